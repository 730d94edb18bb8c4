"""The examinations of ``crosscurrent doctor``. Each tries the thing, rather than ask for its version."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from crosscurrent.cores import num_cores

TIMEOUT = 120
"""Seconds after which a program that is tried counts as broken. It takes one or two."""

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")


class State(Enum):
    """How it is."""

    WORKS = "works"
    MISSING = "not here"
    """Not installed, or no such hardware: what needs it cannot be used, the rest can."""
    BROKEN = "BROKEN"
    """It is here, or has to be, and does not work."""


class Finding(NamedTuple):
    """What came of one examination."""

    name: str
    state: State
    seen: str
    advice: str = ""
    """What to do about it; empty where there is nothing to do."""


Seen = tuple[State, str, str]
"""The state, what was seen, and advice."""


def examine(name: str, examination: Callable[[], Seen]) -> Finding:
    """Do one examination. One that fails in a way that nobody foresaw is a finding like others."""
    try:
        return Finding(name, *examination())
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding(name, State.BROKEN, what, "run `crosscurrent doctor --verbose`, and report this")


def _python() -> Seen:
    said = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return State.WORKS, f"{said}, {num_cores()} core(s)", ""


def _torch() -> Seen:
    import torch

    wanted = _required("torch")
    seen = f"{torch.__version__} (supported: {wanted or 'unknown'})"
    if int(torch.ones(2).sum()) != 2:
        return State.BROKEN, f"{seen}, and 1 + 1 is not 2", "install torch again"
    if not within(torch.__version__, wanted):
        return State.BROKEN, seen, f"install another version: python -m pip install 'torch{wanted}'"
    return State.WORKS, seen, ""


def _required(package: str) -> str:
    """The versions of a package that crosscurrent asks for: ``<2.14,>=2.9``."""
    try:
        lines = metadata.requires("crosscurrent") or []
    except metadata.PackageNotFoundError:  # run from its sources
        return ""
    for line in lines:
        name, bounds = re.match(r"([\w.-]+)\s*\(?([^;)]*)", line).groups()  # type: ignore[union-attr]
        if name == package and "extra ==" not in line:
            return bounds.strip()
    return ""


def within(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as ``>=2.9,<2.14``; local parts (``+cpu``) do not count."""
    numbers = _numbers(version)
    for bound in filter(None, map(str.strip, bounds.split(","))):
        sign, other = re.match(r"(>=|<=|==|!=|<|>)?\s*(.*)", bound).groups()  # type: ignore[union-attr]
        limit = _numbers(other)
        held = {
            ">=": numbers >= limit, "<=": numbers <= limit, "<": numbers < limit, ">": numbers > limit,
            "!=": numbers != limit,
        }.get(sign, numbers == limit)  # fmt: skip
        if not held:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.split(r"[+a-z]", version.lower(), maxsplit=1)[0]
    return (*map(int, re.findall(r"\d+", release)), 0, 0, 0)[:3]


def _cuda() -> Seen:
    import torch

    driver, simulate = shutil.which("nvidia-smi"), "nothing to do: --simulate runs CUDA programs here"
    if torch.version.cuda is None:
        seen = "this torch is built without CUDA"
        return (
            State.MISSING,
            seen,
            "install a build of torch with CUDA to use the GPU" if driver else simulate,
        )
    if not torch.cuda.is_available():
        seen = f"torch is built for CUDA {torch.version.cuda}, and finds no device"
        return State.MISSING, seen, "look at `nvidia-smi` to use the GPU" if driver else simulate
    names = []
    for device in range(torch.cuda.device_count()):
        if int(torch.ones(2, device=f"cuda:{device}").sum().item()) != 2:
            return State.BROKEN, f"cuda:{device} gives wrong sums", "look at `nvidia-smi`"
        properties = torch.cuda.get_device_properties(device)
        names.append(f"cuda:{device} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return State.WORKS, f"CUDA {torch.version.cuda}; {'; '.join(names)}", ""


_RACY = """\
import torch, crosscurrent
with crosscurrent.simulate(), crosscurrent.watch() as seen:
    lane = torch.cuda.Stream()
    values = torch.ones(4, device="cuda")
    with torch.cuda.stream(lane):
        values * 2
assert len(seen.findings) == 1, f"a race was to be found, got {seen.findings}"
with crosscurrent.simulate(), crosscurrent.watch() as seen:
    lane = torch.cuda.Stream()
    values = torch.ones(4, device="cuda")
    lane.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(lane):
        values * 2
assert not seen.findings, f"no race was to be found, got {seen.findings}"
"""


def _simulation() -> Seen:
    import torch

    if torch.cuda.is_available():
        return (
            State.MISSING,
            "nothing is simulated beside a real device",
            "to simulate, hide it: start with CUDA_VISIBLE_DEVICES= (an empty list)",
        )
    if problem := _fails(_RACY):
        return State.BROKEN, problem, "report this, with the output of `crosscurrent doctor`"
    return State.WORKS, "a small race is found, and its repair is none", ""


def _pinned() -> Seen:
    import torch

    if not torch.cuda.is_available():
        return State.MISSING, "pinned memory needs a CUDA device", "nothing to do: simulation has its own"
    try:
        block = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return (
            State.BROKEN,
            f"{error}".splitlines()[0],
            "look at `ulimit -l` and the container's memory limit",
        )
    if not block.is_pinned():
        return State.BROKEN, "memory that was asked for as pinned is not", "look at `ulimit -l`"
    return State.WORKS, "1 MiB could be pinned", ""


def _triton() -> Seen:
    import torch

    if importlib.util.find_spec("triton") is None:
        if torch.version.cuda is None:
            return State.MISSING, "not installed; it comes with CUDA builds of torch", "nothing to do"
        return State.MISSING, "not installed", "python -m pip install triton, for faster operators"
    import triton

    if not torch.cuda.is_available():
        return State.MISSING, f"{triton.__version__}, with no device to compile for", "nothing to do"
    import triton.language as tl  # noqa: F401 (what fails if the installation is incomplete)

    return State.WORKS, str(triton.__version__), ""


_PROFILED = """\
import torch
activities = torch.profiler.supported_activities()
with torch.profiler.profile(activities=activities) as profile:
    torch.ones(4).sum()
assert any("sum" in event.name for event in profile.events()), "it did not see an op"
print(*sorted(activity.name for activity in activities), sep=", ")
"""


def _profiler() -> Seen:
    import torch

    finished = _run([sys.executable, "-c", _PROFILED])  # by itself: it writes to the error output as it likes
    if finished is None or finished.returncode != 0:
        said = f"no end after {TIMEOUT} seconds" if finished is None else _last_line(finished.stderr)
        return State.BROKEN, said, "install torch again"
    names = finished.stdout.strip()
    if torch.cuda.is_available() and "CUDA" not in names:
        return State.BROKEN, f"{names}; it cannot see the device", "install a build of torch with CUPTI"
    return State.WORKS, names, ""


def _chromium() -> Seen:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        advice = "only the tests of the pages need it (Debian: apt-get install chromium)"
        return State.MISSING, "no Chromium", advice
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text("<p id=x></p><script>x.textContent = 'a' + 'live'</script>", encoding="utf-8")
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder}/profile",
        ]
        finished = _run([*command, "--dump-dom", page.as_uri()])
    if finished is None or "alive" not in finished.stdout:
        return (
            State.BROKEN,
            f"{browser} does not render a page",
            f"try: {browser} --headless --dump-dom about:blank",
        )
    return State.WORKS, browser, ""


def _ray() -> Seen:
    if importlib.util.find_spec("ray") is None:
        advice = 'python -m pip install "crosscurrent[ray]", for `replay --engine ray`'
        return State.MISSING, "not installed", advice
    if problem := _fails("import ray"):
        return State.BROKEN, problem, 'python -m pip install --force-reinstall "crosscurrent[ray]"'
    return State.WORKS, metadata.version("ray"), ""


def _compiled() -> Seen:
    from crosscurrent.trace.sites import COMPILED

    if not COMPILED:
        advice = (
            "to watch at about two thirds of the cost, with a C compiler: "
            "HATCH_BUILD_HOOK_ENABLE_MYPYC=1 HATCH_BUILD_CLEAN_HOOKS_AFTER=1 "
            "python -m pip install --force-reinstall --no-deps <the checkout>"
        )
        return State.MISSING, "what a watch does for each op is interpreted", advice
    return State.WORKS, "what a watch does for each op is compiled", ""


def _pytest() -> Seen:
    if importlib.util.find_spec("pytest") is None:
        return State.MISSING, "pytest is not installed", 'python -m pip install "crosscurrent[test]"'
    entries = [entry for entry in metadata.entry_points(group="pytest11") if entry.name == "crosscurrent"]
    if not entries:
        return State.BROKEN, "pytest does not know the plugin", "python -m pip install crosscurrent"
    entries[0].load()
    with tempfile.TemporaryDirectory() as folder:
        finished = _run(
            [sys.executable, "-m", "pytest", "--fixtures", "-q", "-p", "no:cacheprovider"], folder
        )
    if finished is None or "crosscurrent" not in finished.stdout:
        said = "" if finished is None else _last_line(finished.stderr or finished.stdout)
        return State.BROKEN, f"pytest offers no fixture of ours: {said}", "python -m pytest --trace-config"
    return State.WORKS, f"pytest {metadata.version('pytest')} offers the fixture `crosscurrent`", ""


def _fails(program: str) -> str:
    """What goes wrong with a program in a process of its own; empty if nothing does."""
    finished = _run([sys.executable, "-c", program])
    if finished is None:
        return f"no end after {TIMEOUT} seconds"
    return "" if finished.returncode == 0 else _last_line(finished.stderr) or f"status {finished.returncode}"


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
            cwd=folder,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


EXAMINATIONS: Final[Mapping[str, Callable[[], Seen]]] = {
    "python": _python,
    "torch": _torch,
    "CUDA": _cuda,
    "simulated CUDA": _simulation,
    "pinned memory": _pinned,
    "Triton": _triton,
    "profiler": _profiler,
    "Chromium": _chromium,
    "Ray": _ray,
    "pytest plugin": _pytest,
    "compiled watch": _compiled,
}
"""By name, in the order in which they are shown."""
