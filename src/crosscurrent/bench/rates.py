"""How fast this machine multiplies matrices and copies, measured in the run that is compared with it.

Products are timed at a configuration's own shapes, in its dtype, on random data: with zeros a GPU takes less
power and goes faster. Copies have the size of the configuration's largest checkpoint, from and to pinned
memory, on streams of their own. The host issues everything while the device still sleeps, so that the time
of a launch does not count. All times are those of CUDA events; in simulation these show its model clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscurrent.bench.counts import Product, Role

_SLEEP_CYCLES = 10_000_000
"""Some 5 milliseconds: enough to issue what is timed, at 50 microseconds a launch."""
_PRODUCTS = 20
_COPIED_BYTES = 1 << 30
_MOST_COPIES = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What was measured, in operations and bytes a second."""

    products: dict[Product, float]
    """By product."""
    overall: float
    """All products of the configuration, one after the other, each as often as it is needed."""
    to_device: float
    to_host: float
    to_device_at_once: float
    """While the other direction is busy, too."""
    to_host_at_once: float
    copy_bytes: int
    """Of one copy."""


def measure(products: dict[Product, int], *, dtype: torch.dtype, copy_bytes: int) -> Rates:
    """Measure all rates on the current CUDA device. ``products``: how often each is needed."""
    seconds = {product: _product_seconds(product, dtype) for product in products}
    operations = sum(product.operations * num for product, num in products.items())
    to_device, to_host, device_at_once, host_at_once = _copy_rates(copy_bytes)
    return Rates(
        products={product: product.operations / each for product, each in seconds.items()},
        overall=operations / sum(seconds[product] * num for product, num in products.items()),
        to_device=to_device,
        to_host=to_host,
        to_device_at_once=device_at_once,
        to_host_at_once=host_at_once,
        copy_bytes=copy_bytes,
    )


def _product_seconds(product: Product, dtype: torch.dtype) -> float:
    """Seconds of one product."""
    x, dy, w = (
        torch.randn(shape, device="cuda", dtype=dtype)
        for shape in (
            (product.rows, product.in_size),
            (product.rows, product.out_size),
            (product.out_size, product.in_size),
        )
    )
    left, right = {
        Role.OUTPUT: (x, w.mT),
        Role.INPUT: (dy, w),
        Role.WEIGHT: (dy.mT, x),
    }[product.role]
    out = torch.empty(left.shape[0], right.shape[1], device="cuda", dtype=dtype)

    def multiply() -> None:
        torch.mm(left, right, out=out)

    for _ in range(2):  # the first call chooses a kernel, and both wake the device up
        multiply()
    stream = torch.cuda.current_stream()
    return _seconds([(stream, multiply)], _PRODUCTS)[0]


def _copy_rates(num_bytes: int) -> tuple[float, float, float, float]:
    """Bytes a second to the device, to the host, and both at once."""
    times = max(1, min(_MOST_COPIES, _COPIED_BYTES // num_bytes))
    incoming = _copy(num_bytes, to_device=True), _copy(num_bytes, to_device=False)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call, unused-ignore]
    work = list(zip(streams, incoming, strict=True))
    _seconds(work, 1)
    seconds = [*_seconds(work[:1], times), *_seconds(work[1:], times), *_seconds(work, times)]
    to_device, to_host, device_at_once, host_at_once = (num_bytes / each for each in seconds)
    return to_device, to_host, device_at_once, host_at_once


def _copy(num_bytes: int, *, to_device: bool) -> Callable[[], object]:
    on_host = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target, source = (on_device, on_host) if to_device else (on_host, on_device)

    def copy() -> Tensor:
        return target.copy_(source, non_blocking=True)

    return copy


def _seconds(work: Iterable[tuple[torch.cuda.Stream, Callable[[], object]]], times: int) -> Sequence[float]:
    """Seconds that each piece of work takes on its stream, on average of several, all begun together."""
    torch.cuda.synchronize()
    main = torch.cuda.current_stream()
    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call, unused-ignore]
    start = _event()
    start.record(main)
    stops = []
    for stream, act in work:
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            for _ in range(times):
                act()
        stops.append(_event())
        stops[-1].record(stream)
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1000 / times for stop in stops]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]
