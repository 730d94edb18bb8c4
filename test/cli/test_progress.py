"""Long commands say how much time is left, to a terminal and to nobody else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import crosscurrent
from crosscurrent.cli import main
from crosscurrent.cli.checkup import EXAMINATIONS

SIMULATE = () if torch.cuda.is_available() else ("--simulate",)
LONG = """\
import torch
side = torch.cuda.Stream()
x = torch.ones(8, device="cuda")
for _ in range(100):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    y = x + 1
"""


RACY = LONG.replace("side.wait_stream(torch.cuda.current_stream())", "pass").replace("mul_(2)", "mul_(1)")
"""The same race again and again, and no order that changes a value."""

MAIN = "from crosscurrent.cli import main; raise SystemExit(main())"
QUICK_EXAMINATIONS = f"""
from crosscurrent.cli import checkup
works = checkup.State.WORKS, "", ""
checkup.EXAMINATIONS = dict.fromkeys(checkup.EXAMINATIONS, lambda: works)
{MAIN}
"""
ONE_RACE = f"""
from crosscurrent.stress import history
history.PAST_RACES = history.PAST_RACES[:1]
{MAIN}
"""


def _on_a_terminal(words: list[str], *, code: int = 0, program: str = MAIN, **environment: str) -> str:
    """What a command shows on a terminal of its own, before it ends with an exit code."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **environment},
    )
    os.close(its)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other side was closed: how Linux says that it ended
        pass
    os.close(ours)
    assert process.wait() == code, shown.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A race-free program of some hundred ops."""
    folder = tmp_path_factory.mktemp("progress")
    (folder / "long.py").write_text(LONG, encoding="utf-8")
    assert main(["check", *SIMULATE, "--save", str(folder / "long.ccp"), str(folder / "long.py")]) == 0
    return str(folder / "long.ccp")


@pytest.mark.parametrize("engine", [(), ("--engine", "processes", "--workers", "2")])
def test_a_replay_says_how_much_is_left(program: str, engine: tuple[str, ...]) -> None:
    shown = _on_a_terminal(["replay", program, "--schedules", "1500", *engine])
    counts = [(int(done), int(most)) for done, most in re.findall(r"schedules \S+ +(\d+)/(\d+)", shown)]
    # For two choices of memory: random ones, those of PCT, and both streams as early and as late as can be.
    assert {most for _, most in counts} == {2 * (2 * 1500 + 2 * 2)}
    assert counts[0][0] < counts[-1][0] <= counts[-1][1]
    assert re.search(r"gone, +\d+:\d\d:\d\d left", shown), "the time left"


@pytest.mark.parametrize("no_color", ["1", None])
def test_nothing_moves_where_it_is_not_wanted(
    program: str, no_color: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", program, "--schedules", "20"]
    if no_color is None:
        assert main(words) == 0
        shown = "".join(capfd.readouterr())
    else:
        shown = _on_a_terminal(words, NO_COLOR=no_color)
    assert "left" not in shown
    assert shown.splitlines()[0] == "program order: the recorded values"


def test_a_check_counts_the_reports_that_it_writes(program: str, tmp_path: Path) -> None:
    script = str(Path(program).with_name("long.py"))
    files = ["--advice", "--json", "a.json", "--html", "a.html", "--perfetto", "a.trace"]
    paths = [str(tmp_path / word) if "." in word else word for word in files]
    shown = _on_a_terminal(["check", *SIMULATE, *paths, script])
    assert re.search(r"report \S+ +4/4", shown)
    # There is nothing to wait for with a report that is only shown.
    assert "gone," not in _on_a_terminal(["check", *SIMULATE, script])


def test_a_proof_counts_the_runs_that_it_takes_at_most(tmp_path: Path) -> None:
    script = tmp_path / "racy.py"
    script.write_text(RACY, encoding="utf-8")
    shown = _on_a_terminal(["check", *SIMULATE, "--prove", str(script)], code=1)
    counts = [
        (int(runs), int(most)) for runs, most in re.findall(r"prove race \S+ of \S+ \S+ +(\d+)/(\d+)", shown)
    ]
    bounds = [most for _, most in counts]
    assert bounds == sorted(bounds, reverse=True)
    assert counts[-1][0] == counts[-1][1]
    assert counts[-1][0] > 32, "all pairs that are alike were tried"
    assert "witness  unproven" in shown


def test_a_program_that_is_saved_and_loaded_says_how_much_is_left(program: str, tmp_path: Path) -> None:
    script, file = str(Path(program).with_name("long.py")), str(tmp_path / "again.ccp")
    done = r"{} program \S+ +100% .* gone, +0:00:00 left"
    assert re.search(done.format("save"), _on_a_terminal(["check", *SIMULATE, "--save", file, script]))
    assert re.search(done.format("load"), _on_a_terminal(["replay", file]))


@pytest.mark.parametrize("schedule", [False, True])
def test_a_replay_in_one_order_says_how_much_is_left(program: str, *, schedule: bool) -> None:
    from crosscurrent.schedules import Schedule, load

    words = ["replay", program]
    if schedule:
        loaded = load(program)
        words.append(str(Schedule(program=loaded.fingerprint, linear=loaded.order().program)))
    shown = _on_a_terminal(words)
    shares = [int(share) for share in re.findall(r"(?:program order|schedule) \S+ +(\d+)% .*? left", shown)]
    assert (shares[0], shares[-1]) == (0, 100)
    assert shares == sorted(shares)
    assert re.search(r"(program order|schedule) \S+ +100% .*? gone, +0:00:00 left", shown)


@pytest.mark.parametrize(
    ("words", "steps", "program"),
    [
        ("doctor", len(EXAMINATIONS), QUICK_EXAMINATIONS),
        ("verify --layers contracts", 4, MAIN),
        ("stress --seeds 2 --policies lastrec --quantizers default --checkpoints kv_checkpoints", 3, MAIN),
        pytest.param("stress --history", 2, ONE_RACE, marks=pytest.mark.simulation),
        ("train --steps 3", 3, MAIN),
        pytest.param("bench cpu-small --repeats 1", 5, MAIN, marks=pytest.mark.simulation),
    ],
    ids=lambda value: value if value not in (MAIN, QUICK_EXAMINATIONS, ONE_RACE) else "",
)
def test_every_long_command_counts_its_steps(
    words: str, steps: int, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = _on_a_terminal(words.split(), program=program)
    done = [int(count) for count in re.findall(rf"(\d+)/{steps} .*? gone, +[-\d:]+ left", shown)]
    assert done[0] == 0
    assert done[-1] == steps
    assert done == sorted(done)


def test_the_analysis_of_an_overlap_says_how_much_is_left(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(LONG, encoding="utf-8")
    shown = _on_a_terminal(["overlap", *SIMULATE, str(script)])
    assert re.search(r"overlap \S+ +(\d\d+)/\1 .* gone, +0:00:00 left", shown)


@pytest.mark.simulation
@pytest.mark.parametrize(("waits", "passes"), [(0, 4 + 2 + 2 + 2), (1, 4 + 2 + 3 + 2), (12, 4 + 2 + 10 + 2)])
def test_the_passes_of_an_analysis_are_counted_against_a_bound_that_only_shrinks(
    waits: int, passes: int
) -> None:
    told: list[tuple[int, int]] = []
    with crosscurrent.simulate():
        run = crosscurrent.overlap().__enter__()
        lanes = [torch.cuda.Stream() for _ in range(waits)]
        x = torch.ones(1 << 16, device="cuda")
        for number, lane in enumerate(lanes):
            # A call site of its own for each, as if they were written one below the other.
            exec(compile("\n" * number + "lane.wait_stream(torch.cuda.current_stream())", __file__, "exec"))
            with torch.cuda.stream(lane):
                x = x * 2
            torch.cuda.set_stream(lane)
        run.conclude(told=lambda taken, most: told.append((taken, most)))
    bounds = [most for _, most in told]
    assert told[0] == (0, 4 + 2 + 10 + 2)
    assert bounds == sorted(bounds, reverse=True)
    assert told[-1] == (passes, passes)
    assert run.result.bounds is not None
