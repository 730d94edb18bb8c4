"""Delays on a device: chosen ops of chosen lanes wait while the others go on.

>>> with delays(DelayConfig(how=How.RANDOM, seed=17)):
...     step()

A kernel that does nothing for a while (``torch.cuda._sleep``) goes in front of an op on its stream. The
program's results cannot change unless it has a race, in which case they may; the host never waits. It works
from outside, on any code: a dispatch mode that the entering thread has, and its backward passes with it;
not the other threads that the program starts.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.errors import WrongUseError
from crosscurrent.stress.lanes import MAIN, role_of
from crosscurrent.stress.plans import DelayConfig, How, Step
from crosscurrent.trace.access import Kind, signature
from crosscurrent.trace.sites import Sites
from crosscurrent.trace.subclasses import has_own_dispatch, step_aside

logger = logging.getLogger(__name__)

_LAUNCHES_NOTHING = frozenset({Kind.NOTHING, Kind.EMPTY, Kind.RESIZE, Kind.PIN, Kind.RECORD_STREAM})

_CALIBRATION = 5_000_000
"""Cycles to measure the clock with: some milliseconds, far more than a launch takes."""


class _Known(NamedTuple):
    """An op that was met."""

    func: Any
    """The op itself is kept, so that its id stays its own."""

    launches: bool
    name: str


def delays(config: DelayConfig, *, length: int = 1000) -> Delays:
    """Delay what runs inside of ``with delays(config):``.

    ``length`` is about how many ops there will be (PCT spreads its moments over them); that of an earlier
    run is its ``num_ops``. Raises ``WrongUseError`` when entered without a CUDA device, real or simulated.
    """
    return Delays(config, length)


class Delays:
    """What was delayed. A context manager; made by :func:`delays`, used once."""

    def __init__(self, config: DelayConfig, length: int) -> None:
        self._config = config
        self._decide = config.start(length)
        self._numbers = itertools.count()
        self._roles: dict[tuple[int, int], str] = {}
        self._cycles: dict[int, float] = {}
        self._known: dict[int, _Known] = {}
        self._sites = Sites() if config.how is How.DIRECTED else None
        self._mode: _DelayMode | None = None
        self.num_ops = 0
        """Ops on streams so far, delayed or not."""
        self.num_delayed = 0
        """Those of them that were delayed."""

    def __enter__(self) -> Delays:
        if self._mode is not None:
            raise WrongUseError("these delays were entered before; make new ones with delays()")
        if not torch.cuda.is_available():
            raise WrongUseError(
                "there is no CUDA device whose ops could be delayed; enter crosscurrent.simulate() first, "
                "or try the schedules of a recorded trace (crosscurrent.stress.Delayed)"
            )
        for device in range(torch.cuda.device_count()):
            self._cycles[device] = cycles_per_us(device)
            self._roles[device, _stream(device)] = MAIN
        self._mode = _DelayMode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._mode is not None, "left without having been entered"
        self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        logger.debug("delayed %d of %d ops: %s", self.num_delayed, self.num_ops, self._config)

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to be issued: put its delay in front of it."""
        known = self._known.get(id(func))
        if known is None:
            sign = signature(func)
            known = self._known[id(func)] = _Known(func, sign.kind not in _LAUNCHES_NOTHING, sign.name)
        if not known.launches:
            return
        device = _device(args, kwargs)
        # A delay that is captured would stay in the graph.
        if device is None or torch.cuda.is_current_stream_capturing():
            return
        self.num_ops += 1
        stream = _stream(device)
        role = self._roles.get((device, stream))
        if role is None:
            role = self._roles[device, stream] = _role(args, kwargs)
        site = None if self._sites is None else self._sites.sites[self._sites.here()]
        microseconds = self._decide(Step(role, next(self._numbers), known.name, site))
        if microseconds > 0:
            self.num_delayed += 1
            with torch.cuda.device(device):
                _sleep(int(microseconds * self._cycles[device]))


class _DelayMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, owner: Delays) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides a handler from the compiler costs more than the handler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and any(has_own_dispatch(kind) for kind in types):
            return step_aside(self, func, types, args, kwargs)
        self._owner.before(func, args, kwargs)
        return func(*args, **kwargs)


def cycles_per_us(device: int) -> float:
    """How many cycles of ``torch.cuda._sleep`` last a microsecond on a device. Measured; the host waits."""
    with torch.cuda.device(device):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        _sleep(_CALIBRATION)  # the first launch loads the kernel, and wakes up an idle clock
        start.record()
        _sleep(_CALIBRATION)
        stop.record()
        stop.synchronize()
        return _CALIBRATION / (1000 * float(start.elapsed_time(stop)))


def _sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _stream(device: int) -> int:
    stream = torch.cuda.current_stream(device)
    return int(stream.stream_id)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The device that an op runs on; None: the host does it."""
    for tensor in _tensors(args, kwargs):
        if tensor.is_cuda:
            return tensor.get_device()
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.cuda.current_device() if device.index is None else device.index
    return None


def _role(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The role of a stream of which this is the first op."""
    tensors = list(_tensors(args, kwargs))
    target = args[0] if args and isinstance(args[0], Tensor) else None
    if len(tensors) == 2 and target is tensors[0]:  # copy_(target, source)
        to_host, from_host = (tensor.device.type == "cpu" for tensor in tensors)
    else:
        to_host = from_host = False
        device = kwargs.get("device")
        if len(tensors) == 1 and isinstance(device, torch.device):  # to(device)
            to_host, from_host = device.type == "cpu", tensors[0].device.type == "cpu"
    return role_of(from_device=not from_host, to_host=to_host, from_host=from_host, to_device=not to_host)
