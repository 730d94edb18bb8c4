"""``crosscurrent replay``: what it says, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import crosscurrent
from crosscurrent.cli import main
from crosscurrent.schedules import Program, Schedule, keep_values, load, prove, save

pytestmark = pytest.mark.simulation


def record(*, fixed: bool) -> tuple[Program, str]:
    with crosscurrent.simulate():
        with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
            copies, host = torch.cuda.Stream(), torch.zeros(4, pin_memory=True)
            loss = torch.ones(4, device="cuda").mul(3)
            if fixed:
                copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copies):
                host.copy_(loss, non_blocking=True)
            torch.cuda.synchronize()
            keeper.name({"host": host, "loss": loss})
        program = keeper.program()
    schedules = [finding.schedule for finding in prove(program, seen.findings)]
    return program, str(schedules[0]) if schedules else ""


@pytest.fixture
def racy(tmp_path: Path) -> tuple[str, str]:
    program, schedule = record(fixed=False)
    save(program, tmp_path / "racy.ccp")
    return str(tmp_path / "racy.ccp"), schedule


@pytest.fixture
def fixed(tmp_path: Path) -> str:
    save(record(fixed=True)[0], tmp_path / "fixed.ccp")
    return str(tmp_path / "fixed.ccp")


def test_the_schedule_of_a_finding_shows_the_wrong_number(
    racy: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *racy]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "host: 4 of 4 elements changed, all of them NaN",
        "  program order: 3, 3, 3, 3",
        "  this schedule: nan, nan, nan, nan",
        "loss: as in program order",
        "  3, 3, 3, 3",
    ]


def test_a_schedule_that_changes_nothing_shows_the_values_too(
    fixed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load(fixed)
    schedule = str(Schedule(program=program.fingerprint, linear=program.order().program, recipe="program"))
    assert main(["replay", fixed, schedule]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "the same values as in program order",
        "host: as in program order",
        "  3, 3, 3, 3",
        "loss: as in program order",
        "  3, 3, 3, 3",
    ]


def test_program_order_gives_the_recorded_values(
    racy: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", racy[0]]) == 0
    assert capsys.readouterr().out == "program order: the recorded values\n"


def test_a_search_finds_the_race_and_prints_its_schedule(
    racy: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", racy[0], "--schedules", "20"]) == 1
    printed = capsys.readouterr().out
    assert "bounded" in printed
    schedule = next(line for line in printed.splitlines() if line.startswith("cc1:"))
    assert main(["replay", racy[0], schedule]) == 1


def test_an_exhaustive_search_says_that_it_saw_everything(
    fixed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", fixed, "--exhaustive", "1000"]) == 0
    assert "schedules (all there are): all the same" in capsys.readouterr().out


def test_random_schedules_are_not_counted_against_an_exhaustive_search(
    racy: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def tried(*options: str) -> int:
        main(["replay", racy[0], *options])
        return int(capsys.readouterr().out.splitlines()[1].split()[0])

    alone = tried("--exhaustive", "1")
    assert tried("--exhaustive", "1", "--schedules", "50") == tried("--schedules", "50") + alone


def test_what_is_wrong_with_a_file_or_a_schedule_is_said(
    racy: tuple[str, str], fixed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, schedule = racy
    (tmp_path / "damaged.ccp").write_bytes(Path(trace).read_bytes()[:-3])
    for arguments, complaint in (
        ([trace, schedule[:-1]], "checksum"),
        ([trace, "cc7" + schedule[3:]], "version 'cc7'"),
        ([fixed, schedule], "belongs to program"),
        ([str(tmp_path / "damaged.ccp"), schedule], "damaged"),
        ([str(tmp_path / "nothing.ccp")], "there is no file"),
        ([trace, schedule, "--schedules", "2"], "either one SCHEDULE"),
        ([trace, "--schedules", "-2"], "not negative"),
        ([trace, "--schedules", "2", "--engine", "processes", "--workers", "0"], "at least 1"),
    ):
        assert main(["replay", *arguments]) == 2
        captured = capsys.readouterr()
        assert complaint in captured.err
        assert not captured.out  # nothing ran


def test_without_ray_it_is_said_what_to_install(
    fixed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert main(["replay", fixed, "--schedules", "2", "--engine", "ray"]) == 2
    assert "crosscurrent[ray]" in capsys.readouterr().err


def test_a_program_that_does_not_give_its_recorded_values_has_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, _ = record(fixed=True)
    program.recorded["loss"].add_(1)
    save(program, tmp_path / "other.ccp")
    assert main(["replay", str(tmp_path / "other.ccp"), "--schedules", "5"]) == 3
    assert capsys.readouterr().out.splitlines() == [
        "program order does not give the recorded values of:",
        "  loss",
    ]
