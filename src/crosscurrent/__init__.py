"""crosscurrent: prove that multi-stream CUDA code in PyTorch is right.

The shortest use of it:

    with crosscurrent.simulate():            # leave out on a machine with a GPU
        with crosscurrent.watch() as watch:
            step()
    watch.raise_for_races()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosscurrent.errors import CrosscurrentError, RaceError, WrongUseError
    from crosscurrent.races.findings import Finding
    from crosscurrent.races.watch import Watch, access, watch
    from crosscurrent.report.profile import overlap
    from crosscurrent.schedules.proving import Proving, proving
    from crosscurrent.trace.simulate import simulate

__version__ = "0.1.0"

__all__ = [
    "CrosscurrentError",
    "Finding",
    "Proving",
    "RaceError",
    "Watch",
    "WrongUseError",
    "__version__",
    "access",
    "overlap",
    "proving",
    "simulate",
    "watch",
]

# Importing torch takes seconds; a command that only prints its version should not wait for that.
_HOMES = {
    "CrosscurrentError": "crosscurrent.errors",
    "Finding": "crosscurrent.races.findings",
    "Proving": "crosscurrent.schedules.proving",
    "RaceError": "crosscurrent.errors",
    "Watch": "crosscurrent.races.watch",
    "WrongUseError": "crosscurrent.errors",
    "access": "crosscurrent.races.watch",
    "overlap": "crosscurrent.report.profile",
    "proving": "crosscurrent.schedules.proving",
    "simulate": "crosscurrent.trace.simulate",
    "watch": "crosscurrent.races.watch",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
