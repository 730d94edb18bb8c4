"""What the README shows is what happens, and what it says to run is what CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from crosscurrent.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _block_after(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, flags=re.DOTALL)
    assert found is not None, f"the README has no block marked {marker!r}"
    return found[1]


def _commands() -> list[str]:
    """The one-line commands of the README's shell blocks."""
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)]


simulated_only = pytest.mark.simulation


@simulated_only
def test_the_report_is_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("racy.py").write_text(_block_after("racy program"), encoding="utf-8")
    command, _, report = _block_after("its report").partition("\n")
    assert main(command.removeprefix("$ crosscurrent ").split()) == 1
    assert capsys.readouterr().err == report


@simulated_only
def test_the_repair_that_it_names_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    repair = "copies.wait_stream(torch.cuda.current_stream())"
    assert f"`{repair}`" in README
    program = _block_after("racy program").replace("with torch", f"{repair}\nwith torch")
    Path("repaired.py").write_text(program, encoding="utf-8")
    assert main(["check", "--simulate", "repaired.py"]) == 0


def test_ci_runs_the_test_command_word_for_word() -> None:
    _, test_command = _commands()
    last_line = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]
    assert last_line == test_command


def test_the_two_commands_are_one_line_each() -> None:
    verify, test = _commands()
    assert "\n" not in verify + test
    assert verify.endswith("crosscurrent verify")
    assert '"../crosscurrent[test]"' in test
    assert "pytest -n auto" in test
