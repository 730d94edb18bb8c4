"""Running somebody's script in this process: it must notice no difference."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from crosscurrent.cli.exits import WrongUseError
from crosscurrent.cli.script import Ending, Script, run


def _never(ending: Ending) -> int:
    raise AssertionError(f"os._exit was not called, yet the script ended with {ending}")


def _write(folder: Path, source: str, name: str = "program.py") -> str:
    path = folder / name
    path.write_text(source)
    return str(path)


def test_script_sees_its_own_name_arguments_and_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, "greeting = 'hello'", "neighbour.py")
    program = _write(
        tmp_path,
        "import sys, neighbour\nprint(__name__, neighbour.greeting, sys.argv[0] == __file__, sys.argv[1:])",
    )
    arguments, path = list(sys.argv), list(sys.path)
    ending = run(Script(program=program, arguments=("--json", "x")), on_os_exit=_never)
    assert ending == Ending(status=0)
    assert capsys.readouterr().out == "__main__ hello True ['--json', 'x']\n"
    assert (sys.argv, sys.path) == (arguments, path)


def test_module_of_the_working_folder_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "a_package_to_run"
    package.mkdir()
    _write(package, "", "__init__.py")
    _write(package, "import sys; print(__name__, sys.argv[1:])", "__main__.py")
    monkeypatch.chdir(tmp_path)
    script = Script(program="a_package_to_run", arguments=("1",), is_module=True)
    script.require_runnable()
    assert run(script, on_os_exit=_never) == Ending(status=0)
    assert capsys.readouterr().out == "__main__ ['1']\n"


@pytest.mark.parametrize(
    "script",
    [
        Script(program="no_such_script.py"),
        Script(program=""),
        Script(program="a\0b.py"),
        Script(program="x" * 5000),
        Script(program="no_such_module_anywhere", is_module=True),
        Script(program="no_such_package.module", is_module=True),
        Script(program="rich.table.nothing", is_module=True),
        Script(program="xml", is_module=True),  # a package without __main__
    ],
)
def test_what_cannot_be_run_is_wrong_use(script: Script) -> None:
    with pytest.raises(WrongUseError, match=r"there is no|is empty"):
        script.require_runnable()


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("", 0),
        ("exit()", 0),
        ("exit(0)", 0),
        ("exit(7)", 7),
        ("exit('no luck')", 1),
        ("raise KeyError(3)", 1),
    ],
)
def test_the_status_is_what_python_would_have_given(source: str, status: int, tmp_path: Path) -> None:
    program = _write(tmp_path, source.replace("exit(", "import sys; sys.exit("))
    ending = run(Script(program=program), on_os_exit=_never)
    assert ending.status == status
    assert ending.failed == (status != 0)


def test_an_exception_shows_the_frames_of_the_script_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _write(tmp_path, "def f():\n    raise ValueError('seen')\nf()\n")
    ending = run(Script(program=program), on_os_exit=_never)
    assert ending.error == "ValueError: seen"
    written = capsys.readouterr().err
    assert written.count('File "') == written.count(program) == 2
    assert written.endswith("ValueError: seen\n")


def test_threads_that_a_script_leaves_running_are_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _write(
        tmp_path,
        "import threading\n"
        "go = threading.Event()\n"
        "def work():\n    go.wait()\n    print('done')\n"
        "threading.Thread(target=work).start()\n"
        "threading.Timer(0.01, go.set).start()\n",
    )
    run(Script(program=program), on_os_exit=_never)
    assert capsys.readouterr().out == "done\n"


def test_os_exit_is_heard_before_the_process_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class GoneError(Exception):
        """Stands for the end of the process: os._exit may not return."""

    left_with: list[int] = []

    def leave(status: int) -> None:
        left_with.append(status)
        raise GoneError

    heard: list[Ending] = []

    def hear(ending: Ending) -> int:
        heard.append(ending)
        return 42

    monkeypatch.setattr(os, "_exit", leave)
    run(Script(program=_write(tmp_path, "import os; os._exit(5)")), on_os_exit=hear)
    assert heard == [Ending(status=5)]
    assert left_with == [42]
    assert os._exit is leave


def test_a_folder_is_a_script_only_with_a_main(tmp_path: Path) -> None:
    with pytest.raises(WrongUseError, match="without a __main__"):
        Script(program=str(tmp_path)).require_runnable()
    _write(tmp_path, "raise SystemExit(3)", "__main__.py")
    script = Script(program=str(tmp_path))
    script.require_runnable()
    assert run(script, on_os_exit=_never) == Ending(status=3)


@pytest.mark.parametrize("end", ["", "raise SystemExit(1)", "raise KeyError(1)", "raise KeyboardInterrupt"])
def test_however_it_ends_its_variables_are_there(end: str, tmp_path: Path) -> None:
    seen: list[object] = []
    program = _write(tmp_path, f"answer = 42\ndef f():\n    {end or 'pass'}\nf()\n")
    run(Script(program=program), on_os_exit=_never, on_end=lambda names: seen.append(names["answer"]))
    assert seen == [42]


def test_what_does_not_even_compile_has_no_variables(tmp_path: Path) -> None:
    seen: list[object] = []
    run(Script(program=_write(tmp_path, "(")), on_os_exit=_never, on_end=seen.append)
    assert seen == [{}]


@pytest.mark.parametrize(
    ("source", "error", "why"),
    [
        (
            "def (\n",
            "SyntaxError: invalid syntax ({path}, line 1)",
            "SyntaxError: invalid syntax ({path}, line 1)",
        ),
        ("raise ValueError('a\\nb')", "ValueError: a\nb", "ValueError: a ..."),
        ("raise KeyError", "KeyError", "KeyError"),
        ("import sys; sys.exit('no')", "no", "no"),
        ("import sys; sys.exit(7)", None, "exit status 7"),
    ],
)
def test_why_it_failed_is_one_line(
    source: str, error: str | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, source)
    ending = run(Script(program=path), on_os_exit=_never)
    assert ending.error == (error and error.format(path=path))
    assert ending.why == why.format(path=path)
    capsys.readouterr()
