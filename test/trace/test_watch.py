"""The watch object: what it offers, and how it answers wrong use."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import crosscurrent
from crosscurrent.trace.records import MemoryKind

TRACE = str(Path(crosscurrent.__file__).parent / "trace") + os.sep


def race() -> None:
    x = torch.zeros(4, 6, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[:, :2].add_(1)
    x.mul(2)


def no_race() -> None:
    torch.zeros(4, device="cuda").add_(1)[0].item()


def test_findings_host_waits_and_unknown_of_a_clean_program(run: Any) -> None:
    watch = run(no_race)
    assert watch.findings == []
    assert [(wait.kind, wait.op) for wait in watch.host_waits] == [
        ("item", "aten._local_scalar_dense.default")
    ]
    assert watch.host_waits[0].site.function == "no_race"
    assert watch.unknown == []
    watch.raise_for_races()
    assert watch.report().startswith("no race")


def test_findings_can_be_asked_for_while_the_watch_is_entered(machine: Any) -> None:
    with machine(), crosscurrent.watch() as watch:
        assert watch.findings == []
        race()
        assert len(watch.findings) == 1
        race()
        assert watch.findings[0].count == 2


def test_raise_for_races_shows_both_accesses(run: Any) -> None:
    watch = run(race)
    with pytest.raises(crosscurrent.RaceError, match=r"aten\.add_\.Tensor[\s\S]*aten\.mul\.Tensor") as caught:
        watch.raise_for_races()
    assert caught.value.findings == tuple(watch.findings)
    assert isinstance(caught.value, (AssertionError, crosscurrent.CrosscurrentError))


def test_same_program_gives_the_same_document(run: Any) -> None:
    first, second = (json.dumps(run(race).to_json()) for _ in range(2))
    assert first == second


def test_json_document(run: Any) -> None:
    document = json.loads(json.dumps(run(race).to_json()))
    assert document["version"] == 1
    (finding,) = document["findings"]
    assert finding["kind"] == "read-after-write"
    assert finding["memory"] == MemoryKind.DEVICE.value
    assert finding["missing_edge"]
    assert finding["fix"]
    first, second = finding["first"], finding["second"]
    assert (first["op"], first["access"], first["lane"]) != (second["op"], second["access"], second["lane"])
    assert first["file"] == __file__
    assert first["function"] == "race"
    assert (first["shape"], first["dtype"], first["bytes"]) == ([4, 2], "float32", [0, 80])
    assert first["index"] < second["index"]


def test_json_counts_equal_host_waits(run: Any) -> None:
    def program() -> None:
        x = torch.zeros(2, device="cuda")
        for _ in range(5):
            x.tolist()

    (wait,) = run(program).to_json()["host_waits"]
    assert (wait["kind"], wait["times"], wait["streams"]) == ("blocking copy", 5, ["cuda:0 default"])


def test_full_stack_ends_at_the_call(run: Any) -> None:
    short = run(race).findings[0].first.site
    assert short.stack == ()
    site = run(race, full_stack=True).findings[0].first.site
    assert (site.file, site.line, site.function) == (short.file, short.line, short.function)
    assert site.stack[-1] == (site.file, site.line, site.function)
    assert "run" in site.stack[-2][2]


def test_trace_is_kept_on_request_only(machine: Any) -> None:
    with machine(), crosscurrent.watch() as watch:
        no_race()
    with pytest.raises(crosscurrent.WrongUseError, match="trace=True"):
        _ = watch.records


def test_advice_tells_a_needed_wait_from_a_redundant_one(run: Any) -> None:
    def program() -> None:
        x = torch.zeros(4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        torch.cuda.synchronize()

    verdicts = {advice.verdict.value for advice in run(program).advice}
    assert verdicts & {"redundant"}, verdicts


def test_watch_needs_a_device_or_a_simulation() -> None:
    if torch.cuda.is_available():
        with crosscurrent.watch():
            return
    watch = crosscurrent.watch()
    with pytest.raises(crosscurrent.WrongUseError, match=r"crosscurrent\.simulate\(\)"):
        watch.__enter__()


def test_watch_is_for_one_use(machine: Any) -> None:
    with machine():
        watch = crosscurrent.watch()
        with pytest.raises(crosscurrent.WrongUseError, match="entered"):
            watch.__exit__(None, None, None)
        with pytest.raises(crosscurrent.WrongUseError, match="with"):
            _ = watch.info
        with watch:
            pass
        with pytest.raises(crosscurrent.WrongUseError, match="twice"):
            watch.__exit__(None, None, None)
        with pytest.raises(crosscurrent.WrongUseError, match="before"):
            watch.__enter__()


def test_watch_is_left_in_its_own_thread(machine: Any) -> None:
    with machine(), crosscurrent.watch() as watch:
        caught: list[BaseException] = []

        def leave() -> None:
            try:
                watch.__exit__(None, None, None)
            except crosscurrent.WrongUseError as error:
                caught.append(error)

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert "another thread" in str(caught[0])


def test_watches_are_left_in_reverse_order(machine: Any) -> None:
    with machine(), crosscurrent.watch() as outer:
        with crosscurrent.watch() as inner:
            with pytest.raises(crosscurrent.WrongUseError, match="order"):
                outer.__exit__(None, None, None)
            race()
        torch.cuda.synchronize()
    assert len(inner.findings) == 1
    assert len(outer.findings) == 1
    assert len(inner.host_waits) == 0
    assert len(outer.host_waits) == 1


def test_two_threads_may_each_have_a_watch(machine: Any) -> None:
    with machine():
        inside, leave = threading.Event(), threading.Event()
        watches: list[crosscurrent.Watch] = []

        def work() -> None:
            with crosscurrent.watch() as watch:
                watches.append(watch)
                inside.set()
                leave.wait()

        with crosscurrent.watch():
            thread = threading.Thread(target=work)
            thread.start()
            inside.wait()
        leave.set()
        thread.join()
        assert watches[0].findings == []


def test_program_that_raises_is_let_through_and_judged(machine: Any) -> None:
    def program() -> None:
        race()
        raise KeyError("mine")

    with machine():
        before = torch.Tensor.numpy
        with pytest.raises(KeyError, match="mine"), crosscurrent.watch() as watch:
            program()
        assert torch.Tensor.numpy is before
        with crosscurrent.watch() as second:
            no_race()
    assert len(watch.findings) == 1
    assert second.findings == []


@pytest.mark.simulation  # a forked process cannot use a real device
class Interrupt:
    """Control-C at the ``at``-th place in the tracer where Python looks for signals: after calls."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(TRACE):
            self.at -= 1
            if self.at == 0:
                raise KeyboardInterrupt


@pytest.mark.simulation  # on a GPU PyTorch's own callbacks would be interrupted, too, which they cannot bear
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_in_a_tap_harms_no_later_op_and_no_other_thread(machine: Any) -> None:
    with machine(), crosscurrent.watch(trace=True) as watch:
        x = torch.ones(4, device="cuda")
        add = partial(torch.add, x, 1)
        add()  # what is worked out once is no longer in the way
        for at in range(1, 1000):
            interrupt = Interrupt(at)
            sys.setprofile(interrupt)
            try:
                y = add()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            if interrupt.at > 0:
                break
            thread = threading.Thread(target=x.add_, args=(1,), daemon=True)
            thread.start()
            thread.join(10)
            assert not thread.is_alive(), "the lock was not given back"
        y.add_(1)
    assert interrupt.at > 0
    assert watch.unknown == []


def test_interrupt_while_another_thread_holds_the_lock_is_what_is_raised(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with machine(), crosscurrent.watch() as watch:
        x = torch.ones(4, device="cuda")
        monkeypatch.setattr(watch.tracer, "_acquire", interrupted)
        with pytest.raises(KeyboardInterrupt):
            x.add_(1)
        monkeypatch.undo()


def test_child_of_a_fork_is_not_watched(machine: Any) -> None:
    with machine(), crosscurrent.watch(trace=True) as watch:
        torch.zeros(4, device="cuda")
        num = len(watch.records)
        child = os.fork()
        if child == 0:
            torch.ones(4).add_(1)
            watch.__exit__(None, None, None)
            os._exit(0 if len(watch.records) == num else 1)
        assert os.waitpid(child, 0)[1] == 0
        race()
    assert len(watch.findings) == 1


def test_what_happens_after_the_watch_is_not_seen(machine: Any) -> None:
    with machine():
        with crosscurrent.watch(trace=True) as watch:
            x = torch.zeros(4, device="cuda")
        num = len(watch.records)
        x.add_(1)
        del x
        torch.cuda.synchronize()
    assert len(watch.records) == num


def test_access_does_nothing_without_a_watch() -> None:
    crosscurrent.access(reads=[torch.zeros(2)], writes=[torch.zeros(2)])


def test_package_is_imported_without_torch() -> None:
    code = (
        "import sys, crosscurrent; crosscurrent.__version__; dir(crosscurrent); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_package_names_resolve() -> None:
    for name in crosscurrent.__all__:
        assert getattr(crosscurrent, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = crosscurrent.nonsense


def test_many_streams_and_events_leave_nothing_behind(machine: Any) -> None:
    """What a tracer remembers grows with what is live, not with the program."""
    with machine(), crosscurrent.watch() as watch:
        x = torch.zeros(4, device="cuda")
        side = torch.cuda.Stream()
        sizes = []
        for _ in range(3):
            for _ in range(200):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x.add_(1)
                torch.cuda.current_stream().wait_event(side.record_event())
                x.mul_(2)
            tracer = watch.tracer
            sizes.append((len(tracer._recorded_at), len(tracer._blocks), len(tracer.info.sites)))
        assert watch.findings == []
    assert sizes[1] == sizes[2], sizes


def test_watch_that_nobody_has_any_more_is_gone_at_once(machine: Any) -> None:
    """What it remembers may be large. An observer, which its tracer holds, stands for all of it."""

    class Observer:
        def before_call(self, *call: Any) -> None: ...

        def after_call(self, *call: Any) -> None: ...

    with machine():
        x = torch.ones(4, device="cuda")
        gc.collect()
        gc.disable()
        try:
            with crosscurrent.watch(trace=True) as watch:
                observer = Observer()
                watch.tracer.observers.append(observer)
                x.add_(1).sum()
            assert not watch.findings
            held = weakref.ref(observer)
            del observer
            assert held() is not None
            del watch
            assert held() is None
        finally:
            gc.enable()
