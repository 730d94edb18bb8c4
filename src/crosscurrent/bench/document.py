"""What was measured as one JSON document: seconds, bytes and operations, each a plain number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

import crosscurrent
from crosscurrent.bench.measurements import FlagResult, Profile, Result, StepTimes
from crosscurrent.bench.rates import Rates
from crosscurrent.bench.roofline import Bound, Roofline
from crosscurrent.report.source import place_of

FORMAT = "crosscurrent bench"
VERSION = 1
"""It changes when a field changes its meaning or goes, not when one is added."""

_TIMES: dict[str, Callable[[StepTimes], float]] = {
    "forward": lambda times: times.forward,
    "backward": lambda times: times.backward,
    "step": lambda times: times.step,
    "host_forward": lambda times: times.host_forward,
    "host_backward": lambda times: times.host_backward,
}

NOTES = (
    "Seconds are medians; forward and backward are those between CUDA events, host those between a call and "
    "its return. Off and on take turns, after warm steps. A ratio is off over on.",
    "Timings are taken without deterministic algorithms. Losses and gradients are compared bit for bit "
    "under torch.use_deterministic_algorithms(True), in further steps.",
    "Peak device memory includes parameters, gradients and what is held for CUDA graphs. Pinned memory is "
    "what PyTorch's allocator gives out, which rounds each buffer up to a power of two.",
    "Hidden share and host waits are those of a further step under the profiler, which slows the host down. "
    "Hidden share: |transfer and kernel| / |transfer|, intervals united and not added.",
)
MODEL_NOTE = (
    "Simulated: seconds are those of the simulation's model clock, pinned memory is what the model plans to "
    "take, the overlap is that of a cost model. Only host seconds are real. None of it predicts a GPU."
)


class Verdict(Enum):
    """What the comparisons of all configurations say together."""

    EQUAL = "equal"
    """Off and on gave the same bits in each."""
    DIFFERENT = "different"
    """They did not in at least one, or a value was not finite."""
    NO_VERDICT = "no verdict"
    """Nothing was wrong, but a configuration could not be run."""


def verdict_of(results: Sequence[Result], errors: dict[str, str]) -> Verdict:
    """The worst that was seen; a configuration that failed proves nothing."""
    if not all(result.comparison.is_right for result in results):
        return Verdict.DIFFERENT
    return Verdict.EQUAL if results and not errors else Verdict.NO_VERDICT


def as_json(results: Sequence[Result], errors: dict[str, str]) -> dict[str, Any]:
    """The document. ``errors``: by configuration, why it could not be measured."""
    notes = [*NOTES, MODEL_NOTE] if any(result.configuration.simulated for result in results) else [*NOTES]
    return {
        "format": FORMAT,
        "version": VERSION,
        "crosscurrent": crosscurrent.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "verdict": verdict_of(results, errors).value,
        "notes": notes,
        "results": [_result(result) for result in results],
        "errors": errors,
    }


def _result(result: Result) -> dict[str, Any]:
    c = result.configuration
    return {
        "name": c.name,
        "description": c.description(),
        "device": result.device,
        "simulated": c.simulated,
        "clock": "model clock of the simulation" if c.simulated else "CUDA events",
        "repeats": c.repeats,
        "off": _flag(result.off, result.roofline),
        "on": _flag(result.on, result.roofline),
        "ratio": {name: result.ratio(_TIMES[name]) for name in ("forward", "backward", "step")},
        "roofline": {
            "seconds": result.roofline.seconds,
            "forward": _bound(result.roofline.forward),
            "backward": _bound(result.roofline.backward),
        },
        "rates": _rates(result.rates),
        "comparison": {
            "equal": result.comparison.is_right,
            "said": result.comparison.sentence(),
            "loss_off": result.comparison.loss_off,
            "loss_on": result.comparison.loss_on,
            "gradients": result.comparison.num_gradients,
            "different": list(result.comparison.different),
            "not_finite": list(result.comparison.not_finite),
        },
    }


def _flag(flag: FlagResult, needed: Roofline) -> dict[str, Any]:
    return {
        **{f"{name}_seconds": flag.median(what) for name, what in _TIMES.items()},
        "all_steps": [{name: what(times) for name, what in _TIMES.items()} for times in flag.times],
        "roofline_share": needed.seconds / flag.median(_TIMES["step"]),
        "peak_device_bytes": flag.peaks.device,
        "peak_pinned_bytes": flag.peaks.pinned,
        "pinned_is_measured": flag.peaks.pinned_is_measured,
        "overlap": _overlap(flag.profile),
    }


def _overlap(profile: Profile) -> dict[str, Any]:
    """The document of the overlap, without its longest lists; see ``report.overlap_json``."""
    whole = profile.overlap.to_json()
    left_out = ("by_site", "copies", "bounds", "blocked_by")
    kept = {name: value for name, value in whole.items() if name not in left_out}
    return {
        **kept,
        "host_waits": sum(part.num for part in profile.overlap.blocked_by),
        "host_waits_at": [
            {
                "call": part.call,
                "place": "unknown place" if part.site is None else place_of(part.site),
                "times": part.num,
                "time": part.time,
            }
            for part in profile.waits
        ],
    }


def _bound(bound: Bound) -> dict[str, Any]:
    return {
        "operations": bound.operations,
        "bytes_to_device": bound.to_device,
        "bytes_to_host": bound.to_host,
        "operation_seconds": bound.operation_seconds,
        "byte_seconds": bound.byte_seconds,
        "seconds": bound.seconds,
    }


def _rates(rates: Rates) -> dict[str, Any]:
    return {
        "operations_per_second": rates.overall,
        "products": [
            {
                "role": product.role.value,
                "rows": product.rows,
                "in_size": product.in_size,
                "out_size": product.out_size,
                "operations_per_second": rate,
            }
            for product, rate in rates.products.items()
        ],
        "bytes_per_second_to_device": rates.to_device,
        "bytes_per_second_to_host": rates.to_host,
        "bytes_per_second_to_device_both_ways": rates.to_device_at_once,
        "bytes_per_second_to_host_both_ways": rates.to_host_at_once,
        "copy_bytes": rates.copy_bytes,
    }
