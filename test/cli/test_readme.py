"""What the README shows is what happens, and what it says to run is what CI runs."""

from __future__ import annotations

import ast
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


def _imports(package: Path) -> set[str]:
    """The names of the packages of this project that one of them imports."""
    names: set[str] = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crosscurrent."):
                names.add(str(node.module).split(".")[1])
    return names


def test_packages_import_each_other_in_the_direction_of_the_arrows() -> None:
    families = [line.split(" <- ") for line in re.findall(r"`(\w+(?: <- \w+)+)`", README)]
    assert len(families) == 2
    (meeting,) = re.findall(r"never meet but in (.*)\.$", README, flags=re.MULTILINE)
    members = {name for family in families for name in family}
    imports = {
        path.parent.name: _imports(path.parent) for path in (ROOT / "src/crosscurrent").glob("*/__init__.py")
    }
    for family in families:
        for position, name in enumerate(family):
            assert imports[name] & members <= set(family[: position + 1]), name
    both = [name for name in imports if all(imports[name] & set(family) for family in families)]
    assert sorted(both) == sorted(re.findall(r"`(\w+)`", meeting))


def test_the_two_commands_are_one_line_each() -> None:
    verify, test = _commands()
    assert "\n" not in verify + test
    assert verify.endswith("crosscurrent verify")
    assert '"../crosscurrent[test]"' in test
    assert "pytest -n auto" in test
