"""The tracer beside PyTorch's own machinery: autograd, hooks, functorch, modes, subclasses, threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import crosscurrent
from crosscurrent.trace.records import Alloc, Free, Op


def names(watch: crosscurrent.Watch) -> list[str]:
    return [record.name.split(".")[1] for record in watch.records if isinstance(record, Op)]


def lanes_of(watch: crosscurrent.Watch, name: str) -> set[str]:
    return {
        watch.lanes[record.lane].name
        for record in watch.records
        if isinstance(record, Op) and record.name.split(".")[1] == name
    }


def test_values_are_those_of_the_program(machine: Any) -> None:
    def step() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 4, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with machine():
        expected = step()
        with crosscurrent.watch() as watch:
            assert step() == expected
    assert watch.findings == []
    assert watch.unknown == []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_under_the_watch(run: Any, use_reentrant: bool) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda", requires_grad=True)
        checkpoint(lambda value: value.sin().cos(), x, use_reentrant=use_reentrant).sum().backward()

    watch = run(program)
    # The last op of the recomputation is not needed, and non-reentrant checkpointing stops before it.
    assert names(watch).count("sin") >= 3 - (not use_reentrant)
    assert watch.findings == []


def test_saved_tensor_hooks_run_under_the_watch(run: Any) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            y = x.exp()
        y.sum().backward()

    watch = run(program)
    assert watch.findings == []
    seen = names(watch)
    assert seen.index("exp") < seen.index("copy_") < seen.index("_to_copy") < seen.index("mul")


def negate(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.neg_()


def test_hooks_and_accumulated_gradients(run: Any) -> None:
    def program() -> None:
        weight = torch.ones(4, device="cuda", requires_grad=True)
        weight.register_post_accumulate_grad_hook(negate)
        for _ in range(2):
            (weight * 2).sum().backward()

    watch = run(program)
    assert names(watch).count("neg_") == 2
    assert watch.findings == []


def test_functorch_transforms(run: Any) -> None:
    def program() -> None:
        x = torch.ones(3, 4, device="cuda")
        torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)
        torch.func.jvp(lambda value: value.exp(), (x,), (x,))
        torch.func.functional_call(torch.nn.Linear(4, 2, device="cuda"), {}, (x,))

    watch = run(program)
    assert {"sin", "cos", "exp"} <= set(names(watch))
    assert watch.findings == []
    assert watch.unknown == []


class Counting(TorchDispatchMode):
    """Some mode of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_other_dispatch_modes_inside_and_outside(machine: Any) -> None:
    with machine():
        with crosscurrent.watch(trace=True) as watch, Counting() as inner:
            torch.ones(4, device="cuda").add_(1)
        with Counting() as outer, crosscurrent.watch(trace=True) as second:
            torch.ones(4, device="cuda").add_(1)
    assert names(watch) == ["ones", "add_"]
    assert names(second) == ["ones", "add_"]
    assert "aten.add_.Tensor" in inner.seen
    assert "aten.add_.Tensor" in outer.seen


def test_flop_counter_and_profiler(run: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def program() -> None:
        x = torch.ones(4, 4, device="cuda")
        with FlopCounterMode(display=False) as counter, torch.profiler.profile():
            x @ x
        assert counter.get_total_flops() == 128

    assert names(run(program)) == ["ones", "mm"]


class Logged(Tensor):
    """A wrapper subclass: its tensor is inside."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Logged:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, Logged) else arg for arg in args]
        return cls(func(*plain, **(kwargs or {})))


def test_operations_of_a_subclass_are_seen_on_its_inner_tensors(run: Any) -> None:
    def program() -> None:
        x = Logged(torch.ones(4, device="cuda"))
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x + 1

    watch = run(program)
    assert names(watch) == ["ones", "add"]
    assert [finding.kind.value for finding in watch.findings] == ["read-after-write"]


def test_threads_share_the_trace_and_have_their_own_streams(run: Any) -> None:
    def program() -> None:
        side = torch.cuda.Stream()

        def work() -> None:
            torch.ones(4, device="cuda").neg_()
            with torch.cuda.stream(side):
                torch.ones(4, device="cuda").sin_()

        with torch.cuda.stream(side):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    watch = run(program)
    assert lanes_of(watch, "neg_") == {"cuda:0 default"}
    assert len(lanes_of(watch, "sin_")) == 1
    assert names(watch).count("neg_") == names(watch).count("sin_") == 4
    assert [record.index for record in watch.records] == list(range(len(watch.records)))


def test_many_threads_keep_the_trace_whole(run: Any) -> None:
    """Frees, allocations and ops from eight threads at once: no index twice, no access to a freed block."""

    def program() -> None:
        def work() -> None:
            x = torch.ones(4, device="cuda")
            for _ in range(100):
                x = x * 2 - x

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    records = run(program).records
    assert [record.index for record in records] == list(range(len(records)))
    live: set[int] = set()
    for record in records:
        if isinstance(record, Alloc):
            live.add(record.block)
        elif isinstance(record, Free):
            live.remove(record.block)
        elif isinstance(record, Op):
            assert {access.block for access in record.accesses} <= live


def test_backward_runs_on_the_streams_of_its_forward(run: Any) -> None:
    def program() -> None:
        side = torch.cuda.Stream()
        x = torch.ones(4, device="cuda", requires_grad=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.sin()
        torch.cuda.current_stream().wait_stream(side)
        y.exp().sum().backward()

    watch = run(program)
    assert "cuda:0 default" not in lanes_of(watch, "cos")  # the backward of sin
    assert watch.findings == []


def test_call_site_is_the_line_of_the_user(run: Any) -> None:
    def program() -> None:
        layer = torch.nn.Linear(4, 4, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()

    watch = run(program)
    lines = {
        record.name.split(".")[1]: watch.info.sites[record.site]
        for record in watch.records
        if isinstance(record, Op)
    }
    assert {site.file for site in lines.values()} == {__file__}
    first = program.__code__.co_firstlineno
    assert lines["addmm"].line == first + 3
    assert lines["_foreach_add_" if "_foreach_add_" in lines else "add_"].line == first + 4


def test_free_has_the_line_that_let_go(run: Any) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda")
        x.add_(1)
        del x
        torch.ones(8, device="cuda")

    watch = run(program)
    free = next(record for record in watch.records if isinstance(record, Free))
    assert watch.info.sites[free.site].line == program.__code__.co_firstlineno + 3


def test_sparse_tensors_are_listed_or_refused(run: Any) -> None:
    """Their memory is not followed, and that is never passed over in silence."""

    def program() -> None:
        index = torch.zeros(1, 2, dtype=torch.long, device="cuda")
        try:
            x = torch.sparse_coo_tensor(index, torch.ones(2, device="cuda"), (4,))
        except NotImplementedError:
            return
        x + x

    with_gpu = torch.cuda.is_available()
    assert bool(run(program).unknown) == with_gpu


def test_op_that_is_not_understood_is_listed_and_harms_nobody(machine: Any) -> None:
    """Whatever goes wrong while an op is looked at: the program goes on, and the report says so."""
    watches: list[crosscurrent.Watch] = []

    class Strange:
        """No tensor, where the schema promises one."""

        def untyped_storage(self) -> None:
            raise TypeError("no storage here")

    def program() -> None:
        tracer = watches[0].tracer
        tracer.op(torch.ops.aten.sin.default, (Strange(),), {}, torch.ones(4, device="cuda"))
        torch.ones(4, device="cuda").neg_()

    with machine(), crosscurrent.watch() as watch:
        watches.append(watch)
        program()
    (what,) = watch.unknown
    assert (what.op, what.reason) == ("aten.sin.default", "TypeError: no storage here")
    assert not watch.report().startswith("no race:")
