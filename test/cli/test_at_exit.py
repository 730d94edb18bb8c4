"""What a script leaves for the end of its process happens before the verdict, in Python's order."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from crosscurrent.cli.at_exit import AtExit
from crosscurrent.cli.script import Ending, Script, run


def _run(folder: Path, source: str, *, on_os_exit: int | None = None) -> Ending:
    def heard(ending: Ending) -> int:
        assert on_os_exit is not None, f"os._exit was not called, yet the script ended with {ending}"
        return on_os_exit

    path = folder / "program.py"
    path.write_text(source)
    return run(Script(program=str(path)), on_os_exit=heard)


OPEN_THREAD_POOL = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
print(pool.submit(int, "1").result())
"""
OPEN_PROCESS_POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
print(pool.submit(int, "1").result())
"""
OPEN_LOOP = """
import asyncio
loop = asyncio.new_event_loop()
async def work():
    return await loop.run_in_executor(None, int, "1")
print(loop.run_until_complete(work()))
"""
WAITS_FOR_MAIN = """
import threading
def work():
    threading.main_thread().join()
    print(int(not threading.main_thread().is_alive()))
threading.Thread(target=work).start()
"""
STARTED_BY_A_THREAD = """
import threading
def work():
    threading.main_thread().join()
    threading.Thread(target=print, args=(1,)).start()
threading.Thread(target=work).start()
"""
DAEMON = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(1)
"""


@pytest.mark.parametrize(
    "source", [OPEN_THREAD_POOL, OPEN_PROCESS_POOL, OPEN_LOOP, WAITS_FOR_MAIN, STARTED_BY_A_THREAD, DAEMON]
)
@pytest.mark.parametrize("end", ["", "raise SystemExit(3)"])
def test_what_is_left_open_hangs_nothing(
    source: str, end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, source + end).status == (3 if end else 0)
    assert capsys.readouterr().out == "1\n"
    with ThreadPoolExecutor(1) as pool:  # and this process takes work again
        assert pool.submit(int, "2").result() == 2
    assert threading.main_thread().is_alive()


def test_exit_functions_run_after_threads_and_the_last_one_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import atexit, threading\n"
        "atexit.register(print, 'first', end='!\\n')\n"
        "@atexit.register\n"
        "def last():\n    print('last')\n"
        "threading.Timer(0.01, print, ['thread']).start()\n"
    )
    assert _run(tmp_path, source) == Ending(status=0)
    assert capsys.readouterr().out == "thread\nlast\nfirst!\n"


@pytest.mark.parametrize("raised", ["SystemExit(3)", "KeyboardInterrupt", "ValueError('seen')"])
def test_what_an_exit_function_raises_is_printed_and_changes_nothing(
    raised: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        f"import atexit, sys\natexit.register(print, 'first')\n"
        f"@atexit.register\ndef fails():\n    raise {raised}\n"
        "sys.exit(5)\n"
    )
    assert _run(tmp_path, source) == Ending(status=5)
    written = capsys.readouterr()
    assert written.out == "first\n"
    assert written.err.startswith("Exception ignored in atexit callback <function fails")
    assert written.err.count('File "') == written.err.count("program.py") == 1


def test_only_what_can_be_called_is_registered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (_run(tmp_path, "import atexit; atexit.register(3)").error or "").startswith("TypeError")
    capsys.readouterr()


def test_a_script_stays_the_main_module_until_it_has_exited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import atexit, pickle\nclass Thing:\n    pass\n"
        "atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Thing()))) is Thing))\n"
    )
    main = sys.modules["__main__"]
    _run(tmp_path, source)
    assert capsys.readouterr().out == "True\n"
    assert sys.modules["__main__"] is main


def test_pools_take_no_work_from_exit_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path, OPEN_THREAD_POOL + "import atexit; atexit.register(pool.submit, print, 'worked')")
    written = capsys.readouterr()
    assert written.out == "1\n"
    assert "RuntimeError: cannot schedule new futures" in written.err


def test_an_exit_function_may_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_with: list[int] = []
    monkeypatch.setattr(os, "_exit", left_with.append)
    _run(tmp_path, "import atexit, os; atexit.register(os._exit, 5)", on_os_exit=42)
    assert left_with == [42]


PROCESS = """
import atexit, sys
atexit.register(print, "process")
from crosscurrent.cli.script import Script, run
ending = run(Script(program=sys.argv[1]), on_os_exit=None)
if ending.status == 7:  # a child that the script forked
    sys.exit(7)
print("ended", ending.status)
"""
"""Runs a script and ends."""


def _lines_of_process(folder: Path, source: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(source)
    command = [sys.executable, "-u", "-c", PROCESS, str(path)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def test_what_is_unregistered_or_comes_too_late_does_not_run(tmp_path: Path) -> None:
    """As in Python, where a function that registers itself again does not run for ever either."""
    source = (
        "import atexit\n"
        "def again():\n    print('again')\n    atexit.register(again)\n"
        "def gone():\n    print('gone')\n"
        "atexit.register(gone)\natexit.register(gone)\natexit.unregister(gone)\n"
        "atexit.register(gone)\n"
        "atexit.register(lambda: atexit.unregister(gone))\n"
        "atexit.register(again)\n"
    )
    assert _lines_of_process(tmp_path, source) == ["again", "ended 0", "process"]


def test_what_python_ran_for_the_script_does_not_run_again(tmp_path: Path) -> None:
    source = "import atexit; atexit.register(print, 'script'); atexit._run_exitfuncs()"
    assert _lines_of_process(tmp_path, source) == ["script", "process", "ended 0"]


def test_a_forked_child_ends_by_itself(tmp_path: Path) -> None:
    source = (
        "import atexit, os, sys\n"
        "atexit.register(lambda: print('script in', 'child' if os.getpid() != parent else 'parent'))\n"
        "parent = os.getpid()\n"
        "if not os.fork():\n"
        "    atexit.register(print, 'child')\n"
        "    sys.exit(7)\n"
        "print('status', os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    assert _lines_of_process(tmp_path, source) == [
        *("child", "script in child", "process"),
        *("status 7", "script in parent", "ended 0", "process"),
    ]


def test_who_is_tired_of_waiting_for_threads_interrupts_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import atexit, threading\n"
        "class Thread(threading.Thread):\n"
        "    def join(self, timeout=None):\n        raise KeyboardInterrupt\n"
        "go = threading.Event()\n"
        "Thread(target=go.wait).start()\n"
        "atexit.register(go.set)\n"
    )
    assert _run(tmp_path, source) == Ending(status=130, error="KeyboardInterrupt")
    assert capsys.readouterr().err.endswith("KeyboardInterrupt\n")


def test_who_interrupts_the_end_of_pools_lets_threads_know_that_main_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: AtExit) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AtExit, "_end_pools", interrupted)
    left = AtExit()
    with left.noted():
        thread = threading.Thread(target=lambda: threading.main_thread().join())
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            left.wait_for_threads()
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_a_child_that_an_exit_function_forked_leaves_the_scripts_processes_alone(tmp_path: Path) -> None:
    source = (
        "import atexit, multiprocessing, os, sys\n"
        "done, end = os.pipe()\n"
        "worker = multiprocessing.get_context('fork').Process(target=os.read, args=(done, 1))\n"
        "worker.start()\n"
        "@atexit.register\n"
        "def forks():\n"
        "    child = os.fork()\n"
        "    if child:\n"
        "        os.waitpid(child, 0)\n"
        "        os.write(end, b'x')\n"
        "        worker.join()\n"
        "        print('worker ended with', worker.exitcode)\n"
        "sys.exit(1)\n"
    )
    lines = _lines_of_process(tmp_path, source)
    assert lines == ["ended 1", "process", "worker ended with 0", "ended 1", "process"]


def test_a_script_may_have_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    source = "import atexit, sys\nsys.stdout = None\natexit.register(int, 'x')\nraise SystemExit(3)\n"
    assert _run(tmp_path, source).status == 3
