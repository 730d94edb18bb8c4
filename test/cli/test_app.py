"""The frame of the command line: help, errors in one line, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from crosscurrent.cli import app
from crosscurrent.cli.exits import CommandError, ExitCode, WrongUseError


def test_help_fits_a_screen_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--help"]) == ExitCode.GOOD
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24  # a terminal of the usual size
    assert max(map(len, lines)) <= 80
    for command in app.COMMANDS:
        assert any(line.split()[:1] == [command] for line in lines)


def test_no_command_shows_the_help_as_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([]) == ExitCode.WRONG_USE
    assert "usage: crosscurrent COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "advice"), [("trian", "did you mean 'train'?"), ("zzz", "the commands are verify, check")]
)
def test_unknown_command_is_one_line_with_advice(
    command: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main([command]) == ExitCode.WRONG_USE
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert advice in error


@pytest.mark.parametrize("command", app.COMMANDS)
def test_every_command_explains_itself_with_one_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main([command, "--help"]) == ExitCode.GOOD
    text = capsys.readouterr().out
    assert text.count("Example: crosscurrent") == 1
    assert "--traceback" in text


@pytest.mark.parametrize("command", app.COMMANDS)
def test_unknown_option_is_wrong_use_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([command, "--nonsense", "1"]) == ExitCode.WRONG_USE
    error = capsys.readouterr().err
    assert error.startswith(f"crosscurrent {command}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WrongUseError("no such\n  file"), ExitCode.WRONG_USE),
        (CommandError("out of\n  memory"), ExitCode.BAD),
        (RuntimeError("something\n  unforeseen"), ExitCode.NO_VERDICT),
    ],
)
@pytest.mark.parametrize("with_traceback", [False, True])
def test_errors_are_one_line_and_show_a_traceback_on_request(
    error: Exception,
    code: ExitCode,
    with_traceback: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from crosscurrent.cli import verify

    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(verify, "run", fail)
    assert app.main(["verify", *(["--traceback"] if with_traceback else [])]) == code
    written = capsys.readouterr().err
    assert ("Traceback (most recent call last)" in written) == with_traceback
    assert written.splitlines()[-1].startswith("crosscurrent verify: ")
    assert " ".join(str(error).split()) in written.splitlines()[-1]


def test_help_imports_neither_torch_nor_a_command() -> None:
    program = (
        "import sys; from crosscurrent.cli import main; code = main(['--help']); "
        "assert 'torch' not in sys.modules and 'jsonargparse' not in sys.modules; sys.exit(code)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_nobody_reading_is_told_by_the_exit_code_alone() -> None:
    program = "import sys; from crosscurrent.cli import main; sys.stdin.read(); sys.exit(main(['--help']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == ExitCode.UNREAD


def test_an_interrupt_while_options_are_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from crosscurrent.cli import verify

    def interrupted() -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "parser", interrupted)
    assert app.main(["verify"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "crosscurrent verify: interrupted\n"


def test_a_file_of_options_that_is_no_text_is_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "junk.yaml").write_bytes(b"\x89\x00\xff")
    assert app.main(["train", "--config", str(tmp_path / "junk.yaml")]) == ExitCode.WRONG_USE
    assert capsys.readouterr().err.count("\n") == 1
