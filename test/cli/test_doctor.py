"""``crosscurrent doctor``: it tries things, tells the absent from the broken, and says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosscurrent.cli import checkup, main
from crosscurrent.cli.checkup import State, examine, within


def test_here_nothing_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    slow = ("Chromium", "Ray")
    monkeypatch.setattr(
        checkup, "EXAMINATIONS", {k: v for k, v in checkup.EXAMINATIONS.items() if k not in slow}
    )
    assert main(["doctor", "--json", "doctor.json"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "nothing is broken"
    document = json.loads(Path("doctor.json").read_text(encoding="utf-8"))
    assert (document["format"], document["version"], document["broken"]) == ("crosscurrent doctor", 1, [])
    states = {each["name"]: each["state"] for each in document["results"]}
    assert states["torch"] == states["pytest plugin"] == states["profiler"] == "works"
    for each in document["results"]:
        assert each["seen"] in said
        assert each["state"] == "works" or each["advice"] in said


def test_what_is_there_and_does_not_work_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> checkup.Seen:
        raise OSError("a library\nis missing")

    absent = (State.MISSING, "not installed", "python -m pip install it")
    monkeypatch.setattr(checkup, "EXAMINATIONS", {"one": lambda: absent, "other": fails})
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "BROKEN   other  OSError: a library is missing" in said
    assert "python -m pip install it" in said
    assert said.splitlines()[-1] == "broken: other"


def test_what_is_not_installed_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(checkup.shutil, "which", lambda name: None)
    for name in ("Ray", "Triton", "Chromium", "pytest plugin"):
        found = examine(name, checkup.EXAMINATIONS[name])
        assert found.state is State.MISSING
        assert found.advice


def test_a_version_out_of_range_is_broken_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_required", lambda package: ">=99,<100")
    found = examine("torch", checkup.EXAMINATIONS["torch"])
    assert found.state is State.BROKEN
    assert "'torch>=99,<100'" in found.advice


@pytest.mark.parametrize("browser", ["#!/bin/sh\nexit 0\n", "#!/bin/sh\necho '<p>'\n"])
def test_a_browser_that_renders_nothing_is_broken(
    browser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "chromium"
    program.write_text(browser, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert examine("Chromium", checkup.EXAMINATIONS["Chromium"]).state is State.BROKEN


@pytest.mark.parametrize(
    ("version", "bounds", "held"),
    [
        ("2.9.0", "<2.14,>=2.9", True),
        ("2.13.1+cpu", "<2.14,>=2.9", True),
        ("2.10", ">=2.9", True),
        ("2.8.9", "<2.14,>=2.9", False),
        ("2.14.0", "<2.14,>=2.9", False),
        ("2.14.0a0+git1", "<2.14", False),
        ("3.0", "==3.0", True),
        ("3.0", "!=3.0", False),
        ("3.0", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, bounds: str, held: bool) -> None:
    assert within(version, bounds) is held


def test_the_range_is_that_of_the_package() -> None:
    assert within("2.9", checkup._required("torch"))
    assert not within("1.0", checkup._required("torch"))
