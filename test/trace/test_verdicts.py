"""Right verdicts: small stream programs, each racy as it stands and correct after a one-line change.

``twin`` says which pair of ops the racy form has to be flagged for. The programs are plain ``torch.cuda``
code: they run on the simulation, and unchanged on a GPU.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import crosscurrent

Program = Callable[[bool], Any]
TWINS: list[Any] = []
SILENT: list[Any] = []

N = 8


def twin(kind: str, first: str, second: str, devices: int = 1) -> Callable[[Program], Program]:
    """Register a program that takes ``fixed``, and the race of its unfixed form.

    Ops are named without namespace and overload; ``a|b`` where a GPU runs another one than a CPU.
    """

    def register(program: Program) -> Program:
        marks = [pytest.mark.two_gpus] if devices == 2 else []
        TWINS.append(pytest.param(program, kind, first, second, devices, id=program.__name__, marks=marks))
        return program

    return register


def silent(program: Callable[[], Any]) -> Callable[[], Any]:
    """Register a program without a race."""
    SILENT.append(pytest.param(program, id=program.__name__))
    return program


def device(value: float = 0.0, *shape: int) -> Tensor:
    return torch.full(shape or (N,), value, device="cuda")


def pinned(value: float = 0.0, *shape: int) -> Tensor:
    return torch.full(shape or (N,), value, pin_memory=True)


def main() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def side(after: torch.cuda.Stream | None = None) -> torch.cuda.Stream:
    """A new stream that has waited for the current one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(after or main())
    return stream


def on(stream: torch.cuda.Stream) -> Any:
    return torch.cuda.stream(stream)


# -- events and streams ------------------------------------------------------------------------------


@twin("read-after-write", "add_", "mul")
def event_wait(fixed: bool) -> None:
    a, x = side(), device()
    a.wait_stream(main())
    with on(a):
        x.add_(1)
        event = a.record_event()
    if fixed:
        main().wait_event(event)
    x.mul(2)


@twin("read-after-write", "add_", "mul")
def wait_binds_to_the_recording_of_its_moment(fixed: bool) -> None:
    x, a, event = device(), side(), torch.cuda.Event()
    a.wait_stream(main())
    event.record(a)
    if not fixed:
        main().wait_event(event)
    with on(a):
        x.add_(1)
    event.record(a)
    if fixed:
        main().wait_event(event)
    x.mul(2)


@twin("read-after-write", "add_", "mul")
def event_never_recorded(fixed: bool) -> None:
    x, a, event = device(), side(), torch.cuda.Event()
    a.wait_stream(main())
    with on(a):
        x.add_(1)
    if fixed:
        event.record(a)
    main().wait_event(event)
    x.mul(2)


@twin("read-after-write", "add_", "mul")
def event_recorded_on_another_stream_later(fixed: bool) -> None:
    """Recording again moves the event; a wait sees the last recording only."""
    x, a, b, event = device(), side(), side(), torch.cuda.Event()
    a.wait_stream(main())
    with on(a):
        x.add_(1)
    event.record(a)
    if not fixed:
        event.record(b)
    event.wait()
    x.mul(2)


@twin("write-after-read", "mul", "zero_")
def wait_stream(fixed: bool) -> None:
    x = device()
    a = side()
    with on(a):
        x.mul(2)
    if fixed:
        main().wait_stream(a)
    x.zero_()


@twin("write-after-read", "mul", "zero_")
def stream_that_waits_for_itself(fixed: bool) -> None:
    x = device()
    a = side()
    with on(a):
        x.mul(2)
    main().wait_stream(a if fixed else main())
    x.zero_()


@twin("write-after-write", "fill_", "zero_")
def order_through_a_third_stream(fixed: bool) -> None:
    x = device()
    a, b = side(), side()
    with on(a):
        x.fill_(1)
    b.wait_stream(a)
    if fixed:
        main().wait_stream(b)
    x.zero_()


@twin("read-after-write", "add_", "mul")
def default_stream_is_not_special(fixed: bool) -> None:
    """Pool streams do not synchronize with the default stream by themselves."""
    x, a = device(), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.add_(1)
    with on(a):
        if fixed:
            a.wait_stream(torch.cuda.default_stream())
        x.mul(2)


@twin("write-after-write", "add_", "add_")
def pool_of_streams_wraps_around(fixed: bool) -> None:
    """Stream objects 1 and 33 of a device are one queue; objects 1 and 32 are not."""
    x = device()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(33)]
    with on(streams[0]):
        x.add_(1)
    with on(streams[32 if fixed else 31]):
        x.add_(1)


# -- the host waits ----------------------------------------------------------------------------------


def _host_reads_after(wait: Callable[[torch.cuda.Stream, torch.cuda.Event, Tensor], Any]) -> Program:
    def program(fixed: bool) -> None:
        x, host, a = device(1.0), pinned(), side()
        with on(a):
            host.copy_(x, non_blocking=True)
            event = a.record_event()
            if fixed:
                wait(a, event, x)
        host.sum()

    return program


def _until(done: Callable[[], bool]) -> None:
    while not done():
        pass


for _name, _wait in {
    "event_synchronize": lambda a, event, x: event.synchronize(),
    "stream_synchronize": lambda a, event, x: a.synchronize(),
    "device_synchronize": lambda a, event, x: torch.cuda.synchronize(),
    "event_query": lambda a, event, x: _until(event.query),
    "stream_query": lambda a, event, x: _until(a.query),
    "item": lambda a, event, x: x[0].item(),
    "tolist": lambda a, event, x: x.tolist(),
    "cpu": lambda a, event, x: x.cpu(),
    "nonzero": lambda a, event, x: x.nonzero(),
    "boolean_index": lambda a, event, x: x[x > 0],
    "masked_select": lambda a, event, x: x.masked_select(x > 0),
    "unique": lambda a, event, x: x.unique(),
    "equal": lambda a, event, x: torch.equal(x, x),
    "blocking_copy_out": lambda a, event, x: pinned().copy_(x),
    "blocking_copy_in": lambda a, event, x: x.copy_(pinned()),
    "copy_to_pageable": lambda a, event, x: torch.empty(N).copy_(x, non_blocking=True),
}.items():
    _program = _host_reads_after(_wait)
    _program.__name__ = f"host_reads_after_{_name}"
    twin("read-after-write", "copy_", "sum")(_program)


@twin("read-after-write", "copy_", "sum")
def item_waits_for_the_current_stream_only(fixed: bool) -> None:
    x, host, a = device(1.0), pinned(), side()
    with on(a):
        host.copy_(x, non_blocking=True)
        if fixed:
            x[0].item()
    x[0].item()
    host.sum()


@twin("read-after-write", "add_", "mul")
def host_orders_two_streams(fixed: bool) -> None:
    x, a, b = device(), side(), torch.cuda.Stream()
    a.wait_stream(main())
    with on(a):
        x.add_(1)
    if fixed:
        a.synchronize()
    with on(b):
        x.mul(2)


@twin("read-after-write", "index", "mul")
def results_of_a_masked_read_are_made_after_the_wait(fixed: bool) -> None:
    """The host waits for the number of elements, not for the elements."""
    x, b = device(1.0), torch.cuda.Stream()
    kept = x[x > 0]
    if fixed:
        b.wait_stream(main())
    with on(b):
        kept.mul(2)


# -- copies ------------------------------------------------------------------------------------------


@twin("read-after-write", "copy_", "mul")
def host_reads_a_copy_out_at_once(fixed: bool) -> None:
    x, host = device(1.0), pinned()
    host.copy_(x, non_blocking=not fixed)
    host * 2


@twin("write-after-read", "_to_copy", "fill_")
def host_refills_a_staging_buffer(fixed: bool) -> None:
    host = pinned(1.0)
    host.to("cuda", non_blocking=not fixed)
    host.fill_(2.0)


@twin("read-after-write", "copy_", "select_scatter")
def types_are_converted_on_the_device(fixed: bool) -> None:
    """A copy that converts is still one transfer, which nobody waits for."""
    x, host = device(1.0), torch.zeros(N, dtype=torch.float64, pin_memory=True)
    host.copy_(x, non_blocking=not fixed)
    torch.select_scatter(host, torch.tensor(0.0, dtype=torch.float64), 0, 0)


@twin("read-after-write", "copy_", "copy_")
def strided_host_side_is_read_when_issued(fixed: bool) -> None:
    """The host reads the strided source itself: the stream's own order does not help."""
    x, host = device(1.0, 4, N), pinned(0.0, 4, N)
    host.copy_(x, non_blocking=True)
    if fixed:
        torch.cuda.synchronize()
    device(0.0, 4, 2).copy_(host[:, :2], non_blocking=True)


@silent
def strided_host_side_may_be_refilled() -> None:
    host = pinned(0.0, 4, N)
    device(0.0, 4, 2).copy_(host[:, :2], non_blocking=True)
    host.fill_(1.0)


@silent
def strided_copy_out_waits() -> None:
    host, x = pinned(0.0, 4, N), device(1.0, 4, 2)
    host[:, :2].copy_(x, non_blocking=True)
    host.sum()


@silent
def rows_of_a_pinned_buffer_are_contiguous() -> None:
    host, x = pinned(0.0, 4, N), device(1.0)
    host[2].copy_(x, non_blocking=True)
    host[1].sum()


@twin("read-after-write", "copy_", "mul")
def pageable_copy_orders_its_stream_only(fixed: bool) -> None:
    x, a, source = device(), side(), torch.ones(N)
    a.wait_stream(main())
    with on(a):
        x.copy_(source, non_blocking=True)
    source.zero_()
    if fixed:
        main().wait_stream(a)
    x.mul(2)


@twin("read-after-write", "_to_copy", "mul")
def copy_to_cpu_that_nobody_waits_for(fixed: bool) -> None:
    """``to("cpu", non_blocking=True)`` gives pinned memory that is still being filled."""
    host = device(1.0).to("cpu", non_blocking=True)
    if fixed:
        torch.cuda.synchronize()
    host.mul(2)


@twin("read-after-write", "copy_", "sum")
def shape_without_content(fixed: bool) -> None:
    """A copy to the meta device moves nothing: nobody waits for it."""
    x, host = device(1.0), pinned()
    host.copy_(x, non_blocking=True)
    x.to("cpu" if fixed else "meta")
    host.sum()


@twin("read-after-write", "_foreach_copy_", "mul")
def foreach_copy(fixed: bool) -> None:
    hosts, xs = [pinned(), pinned()], [device(1.0), device(2.0)]
    torch._foreach_copy_(hosts, xs, non_blocking=True)
    if fixed:
        torch.cuda.synchronize()
    hosts[1].mul(2)


@twin("read-after-write", "copy_", "mul", devices=2)
def copy_between_devices_is_joined_by_the_target(fixed: bool) -> None:
    """The copy runs on the source's device; the target's current stream waits for it, no other."""
    x, y = torch.ones(N, device="cuda:0"), torch.zeros(N, device="cuda:1")
    other = torch.cuda.Stream(1)
    torch.cuda.synchronize(1)
    y.copy_(x)
    with on(torch.cuda.current_stream(1) if fixed else other):
        y.mul(2)


@twin("write-after-read", "mul", "copy_", devices=2)
def copy_between_devices_waits_for_the_target(fixed: bool) -> None:
    x, y = torch.ones(N, device="cuda:0"), torch.zeros(N, device="cuda:1")
    other = torch.cuda.Stream(1)
    torch.cuda.synchronize(1)
    with on(torch.cuda.current_stream(1) if fixed else other):
        y.mul(2)
    y.copy_(x)


@silent
def device_to_host_to_device_on_one_stream() -> None:
    x, host = device(1.0), pinned()
    host.copy_(x, non_blocking=True)
    host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()


@silent
def view_of_no_elements() -> None:
    x = device()
    a = side()
    with on(a):
        x[:0].add_(1)
        x.copy_(x)
    x[N:].zero_()
    main().wait_stream(a)


# -- memory ------------------------------------------------------------------------------------------


@twin("reuse", "mul", "fill_")
def block_freed_while_another_stream_reads(fixed: bool) -> None:
    x = device(1.0)
    a = side()
    with on(a):
        x.mul(2)
    if fixed:
        x.record_stream(a)
    del x
    torch.empty(N, device="cuda").fill_(0)


@twin("reuse", "mul", "fill_")
def wait_between_free_and_reuse(fixed: bool) -> None:
    x = device(1.0)
    a = side()
    with on(a):
        x.mul(2)
    del x
    y = torch.empty(N, device="cuda")
    if fixed:
        main().wait_stream(a)
    y.fill_(0)


@twin("reuse", "mul", "fill_")
def record_stream_of_the_wrong_stream(fixed: bool) -> None:
    x = device(1.0)
    a, b = side(), side()
    with on(a):
        x.mul(2)
    x.record_stream(a if fixed else b)
    del x
    torch.empty(N, device="cuda").fill_(0)


@twin("reuse", "mul", "add")
def work_given_after_record_stream_but_before_the_free(fixed: bool) -> None:
    """Recorded before the work: what counts is what the stream was given by the time of the free."""
    x = device(1.0)
    a = side()
    if fixed:
        x.record_stream(a)
    with on(a):
        x.mul(2)
    del x
    device(1.0).add(1)


@twin("reuse", "mul", "fill_")
def storage_emptied_by_hand(fixed: bool) -> None:
    x = device(1.0)
    a = side()
    with on(a):
        x.mul(2)
    if fixed:
        main().wait_stream(a)
    x.untyped_storage().resize_(0)
    torch.empty(N, device="cuda").fill_(0)
    main().wait_stream(a)


@twin("read-after-write", "add_", "resize_")
def storage_grown_by_set(fixed: bool) -> None:
    """A view that does not fit makes its storage grow, and the content moves on the current stream."""
    x, y = device(1.0), torch.empty(0, device="cuda")
    a = side()
    with on(a):
        x.add_(1)
    if fixed:
        main().wait_stream(a)
    y.set_(x.untyped_storage(), 0, (64 * N,), (1,))
    torch.cuda.synchronize()


@twin("reuse", "mul", "fill_")
def data_swapped(fixed: bool) -> None:
    """``.data =`` gives the old storage back."""
    x = torch.nn.Parameter(device(1.0), requires_grad=False)
    a = side()
    with on(a):
        x.mul(2)
    if fixed:
        main().wait_stream(a)
    x.data = torch.zeros(0, device="cuda")
    torch.empty(N, device="cuda").fill_(0)


@silent
def freed_pinned_memory_is_kept_for_copies() -> None:
    x = device()
    host = pinned(1.0)
    x.copy_(host, non_blocking=True)
    del host
    pinned(2.0)


@silent
def reuse_on_its_own_stream() -> None:
    for value in range(4):
        x = device(float(value))
        x = x * 2


@silent
def another_pool_never_serves_the_block() -> None:
    x = device(1.0)
    a = side()
    with on(a):
        x.mul(2)
    del x
    with on(a):
        device(1.0)


# -- ops ---------------------------------------------------------------------------------------------


def _on_two_streams(first: Callable[[Tensor], Any], second: Callable[[Tensor], Any]) -> Callable[[], None]:
    def program() -> None:
        x = device(1.0, 4, N)
        a, b = side(), side()
        with on(a):
            first(x)
        with on(b):
            second(x)

    return program


@twin("write-after-write", "add_", "add_")
def columns_of_one_buffer(fixed: bool) -> None:
    """Strided halves interleave in memory, and share no byte; a column more and they do."""
    start = N // 2 - (0 if fixed else 1)
    _on_two_streams(lambda x: x[:, : N // 2].add_(1), lambda x: x[:, start:].add_(1))()


@twin("write-after-write", "add_", "mul_")
def every_other_element(fixed: bool) -> None:
    start = 1 if fixed else 0
    _on_two_streams(lambda x: x[:, ::2].add_(1), lambda x: x[:, start::2].mul_(2))()


@twin("write-after-write", "zero_", "fill_")
def overlapping_as_strided(fixed: bool) -> None:
    def windows(x: Tensor) -> None:
        x.as_strided((3, 4), (2, 1), 0).zero_()  # touches elements 0 to 7

    _on_two_streams(windows, lambda x: x.view(-1)[8 if fixed else 7 :].fill_(1))()


@twin("write-after-read", "mul", "zero_")
def expanded_tensor(fixed: bool) -> None:
    def read(x: Tensor) -> None:
        x[0, :1].expand(N) * 2  # one element, many times

    _on_two_streams(read, lambda x: x[0, 1 if fixed else 0 :].zero_())()


@twin("write-after-read", "cat", "zero_")
def transposed_rows(fixed: bool) -> None:
    row = 1 if fixed else 0
    _on_two_streams(lambda x: torch.cat([x.t()[:, 0]]), lambda x: x[row].zero_())()


@silent
def views_touch_nothing() -> None:
    x = device(1.0, 4, N)
    a = side()
    with on(a):
        x.add_(1)
    x.view(-1), x.t(), x[0], x.expand(4, N), x.detach(), x.split(2), x.unbind(), x.chunk(2), x.reshape(-1)
    torch.empty_like(x), torch.zeros_like(x), x.new_zeros(3), x.new_empty(3)
    main().wait_stream(a)


@silent
def two_streams_read() -> None:
    x = device(1.0)
    a, b = side(), side()
    with on(a):
        x * 2
    with on(b):
        x.sum()


@twin("read-after-write", "_foreach_add_", "mul")
def foreach(fixed: bool) -> None:
    xs = [device(), device()]
    a = side()
    with on(a):
        torch._foreach_add_(xs, 1.0)
    if fixed:
        main().wait_stream(a)
    xs[1].mul(2)


def _optimizer(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Program:
    def program(fixed: bool) -> None:
        weight = torch.nn.Parameter(device(1.0))
        weight.grad = device(1.0)
        optimizer = make([weight])
        a = side()
        with on(a):
            optimizer.step()
        if fixed:
            main().wait_stream(a)
        weight.detach().sin()

    return program


for _name, _op, _make in (
    ("sgd", "_foreach_add_", lambda weights: torch.optim.SGD(weights, lr=0.1, foreach=True)),
    ("fused_adam", "_fused_adam_", lambda weights: torch.optim.Adam(weights, lr=0.1, fused=True)),
):
    _program = _optimizer(_make)
    _program.__name__ = f"optimizer_{_name}"
    twin("read-after-write", _op, "sin")(_program)


def _fused_step(gradient: Tensor, scale: Tensor | None) -> None:
    torch._fused_adamw_(
        *([device(1.0)], [gradient], [device()], [device()], [], [torch.ones((), device="cuda")]),
        lr=0.1,
        beta1=0.9,
        beta2=0.9,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
    )


@twin("write-after-read", "sum", "_fused_adamw_")
def gradients_are_unscaled_by_a_fused_optimizer(fixed: bool) -> None:
    gradient, scale = device(1.0), torch.ones((), device="cuda")
    a = side()
    with on(a):
        gradient.sum()
    if fixed:
        main().wait_stream(a)
    _fused_step(gradient, scale)
    torch.cuda.synchronize()


@twin("read-after-write", "mul_", "_fused_adamw_")
def gradients_are_clipped_on_another_stream(fixed: bool) -> None:
    gradient = device(1.0)
    a = side()
    with on(a):
        gradient.mul_(0.5)
    if fixed:
        main().wait_stream(a)
    _fused_step(gradient, None)
    torch.cuda.synchronize()


@silent
def gradients_are_read_beside_a_fused_optimizer() -> None:
    """Without a scale there is nothing to write back to them."""
    gradient = device(1.0)
    a = side()
    with on(a):
        gradient.sum()
    _fused_step(gradient, None)
    torch.cuda.synchronize()


def _update(change: Callable[[Tensor, Tensor], Any]) -> Program:
    def program(fixed: bool) -> None:
        x, index = device(0.0, 4, N), torch.tensor([0, 1], device="cuda")
        a = side()
        with on(a):
            change(x, index)
        if fixed:
            main().wait_stream(a)
        x.sin()

    return program


def _rows(value: float) -> Tensor:
    return device(value, 2, N)


for _name, _change in {
    "index_put_": lambda x, index: x.__setitem__(index, _rows(1.0)),
    "index_add_": lambda x, index: x.index_add_(0, index, _rows(1.0)),
    "index_copy_": lambda x, index: x.index_copy_(0, index, _rows(1.0)),
    "index_fill_": lambda x, index: x.index_fill_(0, index, 2.0),
    "scatter_": lambda x, index: x.scatter_(0, index[:, None].expand(2, N), _rows(1.0)),
    "scatter_add_": lambda x, index: x.scatter_add_(0, index[:, None].expand(2, N), _rows(1.0)),
    "masked_fill_": lambda x, index: x.masked_fill_(x == 0, 1.0),
    "copy_": lambda x, index: x[0].copy_(x[1]),
    "normal_": lambda x, index: x.normal_(),
    "addmm_": lambda x, index: x.addmm_(device(1.0, 4, 4), device(1.0, 4, N)),
    "clamp_": lambda x, index: x.clamp_(min=0),
}.items():
    _program = _update(_change)
    _program.__name__ = f"update_by_{_name}"
    twin("read-after-write", _name, "sin")(_program)

for _name, _change in {
    "mm": lambda x, index: torch.mm(device(1.0, 4, 4), device(1.0, 4, N), out=x),
    "add": lambda x, index: torch.add(device(1.0, 4, N), 1.0, out=x),
    "cat": lambda x, index: torch.cat([_rows(1.0), _rows(2.0)], out=x),
}.items():
    _program = _update(_change)
    _program.__name__ = f"out_argument_of_{_name}"
    twin("read-after-write", _name, "sin")(_program)


@twin("read-after-write", "native_batch_norm|cudnn_batch_norm", "sin")
def running_statistics(fixed: bool) -> None:
    """Updated in training, although the schema does not say so."""
    norm = torch.nn.BatchNorm1d(4, device="cuda")
    x = device(1.0, 2, 4)
    a = side()
    with on(a), torch.no_grad():
        norm.train(not fixed)(x)
    assert norm.running_mean is not None
    norm.running_mean.sin()


@twin("read-after-write", "native_batch_norm|cudnn_batch_norm", "sin")
def running_statistics_in_inference_mode(fixed: bool) -> None:
    """Under inference mode PyTorch does not take composite ops apart; the watch has to."""
    norm = torch.nn.BatchNorm1d(4, device="cuda")
    x = device(1.0, 2, 4)
    a = side()
    with on(a), torch.inference_mode():
        norm(x)
    if fixed:
        main().wait_stream(a)
    assert norm.running_mean is not None
    norm.running_mean.sin()


def _statistics(normalize: Callable[[Tensor, Tensor, Tensor], Any]) -> Program:
    def program(fixed: bool) -> None:
        mean, variance, x = device(0.0, 4), device(1.0, 4), device(1.0, 2, 4)
        a = side()
        with on(a):
            normalize(x, mean, variance)
        if fixed:
            main().wait_stream(a)
        mean.sin()
        torch.cuda.synchronize()

    return program


def _normalize_into(x: Tensor, mean: Tensor, variance: Tensor) -> None:
    out, saved, inverse = torch.empty_like(x), device(0.0, 4), device(0.0, 4)
    torch.ops.aten.native_batch_norm.out(
        x, None, None, mean, variance, True, 0.1, 1e-5, out=out, save_mean=saved, save_invstd=inverse
    )


for _name, _op, _normalize in (
    ("an_out_variant", "native_batch_norm", _normalize_into),
    (
        "the_update_alone",
        "batch_norm_update_stats",
        lambda x, mean, variance: torch.batch_norm_update_stats(x, mean, variance, 0.1),
    ),
):
    _program = _statistics(_normalize)
    _program.__name__ = f"running_statistics_of_{_name}"
    twin("read-after-write", _op, "sin")(_program)


@twin("read-after-write", "copy_", "sum")
def number_of_repeats_in_inference_mode(fixed: bool) -> None:
    """The host waits for repeats that are a tensor, not for a number that it knows."""
    with torch.inference_mode():
        x, host = device(1.0), pinned()
        repeats = torch.ones(N, dtype=torch.long, device="cuda")
        torch.cuda.synchronize()
        host.copy_(x, non_blocking=True)
        x.repeat_interleave(repeats if fixed else 2)
        host.sum()


@twin("read-after-write", "add_", "mul")
def declared_kernel(fixed: bool) -> None:
    """``crosscurrent.access`` stands for a kernel that no dispatcher sees."""
    x = device()
    a = side()
    with on(a):
        crosscurrent.access(reads=[x])
        x.add_(1)
    if fixed:
        main().wait_stream(a)
    x.mul(2)


@twin("read-after-write", "access", "mul")
def declared_write(fixed: bool) -> None:
    x = device()
    a = side()
    with on(a):
        crosscurrent.access(writes=[x])
    if fixed:
        main().wait_stream(a)
    x.mul(2)


@twin("write-after-read", "access", "fill_")
def declared_kernel_that_reads_pinned_memory(fixed: bool) -> None:
    x, host = device(), pinned(1.0)
    crosscurrent.access(reads=[host], writes=[x])
    if fixed:
        torch.cuda.synchronize()
    host.fill_(0.0)


# -- the host and pinned memory ----------------------------------------------------------------------


def _host_touches(name: str, touch: Callable[[Tensor], Any], op: str, kind: str = "read-after-write") -> None:
    def program(fixed: bool) -> None:
        host, x = pinned(0.0), device(1.0)
        host.copy_(x, non_blocking=True)
        if fixed:
            torch.cuda.synchronize()
        touch(host)

    program.__name__ = f"host_{name}"
    twin(kind, "copy_", op)(program)


_host_touches("item", lambda host: host[0].item(), "_local_scalar_dense")
_host_touches("tolist", lambda host: host.tolist(), "tolist")
_host_touches("numpy", lambda host: host.numpy(), "numpy")
_host_touches("float", lambda host: float(host[0]), "_local_scalar_dense")
_host_touches("fill", lambda host: host.fill_(1.0), "fill_", "write-after-write")
_host_touches("setitem", lambda host: host.__setitem__(slice(0, 2), 1.0), "fill_", "write-after-write")
_host_touches("clone", lambda host: host.clone(), "clone")
_host_touches("matmul", lambda host: host @ host, "dot")
_host_touches("copy_in", lambda host: host.copy_(torch.ones(N)), "copy_", "write-after-write")
_host_touches("save", lambda host: torch.zeros(N).copy_(host), "copy_")
_host_touches("torch_save", lambda host: torch.save(host, io.BytesIO()), "save")
_host_touches("pickle", pickle.dumps, "save")
_host_touches("safetensors", lambda host: safetensors.torch.save({"host": host}), "save")
_host_touches("print", str, "print")
_host_touches("add_in_place", lambda host: host.add_(1.0), "add_")


@twin("read-after-write", "add_", "print")
def printed(fixed: bool) -> None:
    """Printing goes around all dispatch modes."""
    x, a = device(), side()
    a.wait_stream(main())
    with on(a):
        x.add_(1)
    if fixed:
        main().wait_stream(a)
    repr(x[2:])


@twin("read-after-write", "copy_", "sum")
def printing_makes_the_host_wait(fixed: bool) -> None:
    x, host = device(1.0), pinned()
    host.copy_(x, non_blocking=True)
    if fixed:
        str(x)
    host.sum()


@twin("read-after-write", "add_", "_to_copy|copy_")
def saved_from_the_device(fixed: bool) -> None:
    x, a = device(), side()
    a.wait_stream(main())
    with on(a):
        x.add_(1)
    if fixed:
        main().wait_stream(a)
    torch.save(x, io.BytesIO())


@silent
def host_touches_another_slice() -> None:
    host, x = pinned(0.0, 2, N), device(1.0)
    host[0].copy_(x, non_blocking=True)
    host[1].fill_(2.0)
    host[1].tolist()


# -- threads, devices, autograd ----------------------------------------------------------------------


@twin("read-after-write", "add_", "mul")
def current_stream_belongs_to_a_thread(fixed: bool) -> None:
    x = device()
    a = side()
    with on(a):
        x.add_(1)

        def work() -> None:
            with on(a if fixed else torch.cuda.default_stream()):
                x.mul(2)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if fixed:
            torch.cuda.default_stream().wait_stream(a)


@twin("write-after-read", "mul", "fill_")
def backward_reads_what_forward_saved(fixed: bool) -> None:
    """The backward of ``mul`` reads the saved operand: refilling it has to wait for backward."""
    weight = device(2.0).requires_grad_()
    saved, a = device(3.0), side()
    loss = (weight * saved).sum()
    loss.backward()
    if fixed:
        a.wait_stream(main())
    with on(a), torch.no_grad():
        saved.fill_(0.0)


@twin("read-after-write", "mul", "sin")
def backward_runs_on_the_stream_of_its_forward(fixed: bool) -> None:
    """The gradient comes from the forward's stream; only the caller's stream is joined with it."""
    weight = device(2.0).requires_grad_()
    other = device(3.0)
    a, b = side(), torch.cuda.Stream()
    with on(a):
        loss = (weight * other).sum()
    main().wait_stream(a)
    torch.cuda.synchronize()
    loss.backward()
    assert weight.grad is not None
    if fixed:
        b.wait_stream(main())
    with on(b):
        weight.grad.sin()


@twin("write-after-read", "mul", "fill_")
def checkpointed_forward_runs_again(fixed: bool) -> None:
    """Recomputation reads the input a second time, during backward."""
    x = device(2.0).requires_grad_()
    weight, a = device(3.0), side()
    y = checkpoint(lambda value: (value * weight).sin(), x, use_reentrant=False).sum()
    torch.cuda.synchronize()
    y.backward()
    if fixed:
        a.wait_stream(main())
    with on(a), torch.no_grad():
        weight.fill_(0.0)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.neg()


@twin("write-after-read", "neg", "fill_")
def custom_autograd_function(fixed: bool) -> None:
    x, a = device(2.0).requires_grad_(), side()
    _Square.apply(x).sum().backward()
    if fixed:
        a.wait_stream(main())
    with on(a), torch.no_grad():
        x.fill_(0.0)


@twin("read-after-write", "copy_", "_to_copy")
def saved_tensors_on_the_host(fixed: bool) -> None:
    """Hooks that offload saved tensors: the way back is on another stream than the way out."""
    out, back = torch.cuda.Stream(), torch.cuda.Stream()

    def pack(x: Tensor) -> Tensor:
        host = torch.empty(x.shape, pin_memory=True)
        out.wait_stream(main())
        with on(out):
            host.copy_(x, non_blocking=True)
        x.record_stream(out)
        return host

    def unpack(host: Tensor) -> Tensor:
        if fixed:
            back.wait_stream(out)
        with on(back):
            x = host.to("cuda", non_blocking=True)
        main().wait_stream(back)
        x.record_stream(main())
        return x

    x = device(2.0).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = x.exp()
    y.sum().backward()


@twin("read-after-write", "add_", "mul")
def vmap_and_grad(fixed: bool) -> None:
    x, a = device(1.0, 4, N), side()
    a.wait_stream(main())
    with on(a):
        x.add_(1)
    if fixed:
        main().wait_stream(a)
    torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))(x)


@twin("read-after-write", "add_", "mul")
def inference_mode(fixed: bool) -> None:
    with torch.inference_mode():
        x, a = device(1.0), side()
        with on(a):
            x.add_(1)
        if fixed:
            main().wait_stream(a)
        torch.nn.functional.silu(x.reshape(2, -1).contiguous().to(torch.float32) * 2)


# -- the tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "kind", "first", "second", "devices"), TWINS)
def test_racy_form_is_flagged_with_its_pair(
    run: Any, program: Program, kind: str, first: str, second: str, devices: int
) -> None:
    watch = run(program, False, devices=devices)
    assert any(
        each.kind.value == kind and _is(each.first.op, first) and _is(each.second.op, second)
        for finding in watch.findings
        for each in (finding, *finding.also)
    ), watch.report()
    assert len(watch.findings) == 1, watch.report()


@pytest.mark.parametrize(("program", "kind", "first", "second", "devices"), TWINS)
def test_fixed_form_is_silent(
    run: Any, program: Program, kind: str, first: str, second: str, devices: int
) -> None:
    watch = run(program, True, devices=devices)
    assert not watch.findings, watch.report()
    assert not watch.unknown, watch.report()


@pytest.mark.parametrize("program", SILENT)
def test_correct_program_is_silent(run: Any, program: Callable[[], Any]) -> None:
    watch = run(program)
    assert not watch.findings, watch.report()
    assert not watch.unknown, watch.report()


@pytest.mark.simulation  # on a GPU the tests above go through the real callbacks
@pytest.mark.parametrize(
    ("program", "kind", "first", "second", "devices"), [each for each in TWINS if each.values[-1] == 1]
)
@pytest.mark.parametrize("fixed", [False, True])
def test_callbacks_of_a_gpu_give_the_same_verdicts(
    run_by_callbacks: Any, program: Program, kind: str, first: str, second: str, devices: int, fixed: bool
) -> None:
    """The taps for a real GPU, on a simulation that speaks as the CUDA driver does."""
    watch = run_by_callbacks(program, fixed)
    assert len(watch.findings) == (not fixed), watch.report()
    assert not watch.unknown, watch.report()


def _is(op: str, names: str) -> bool:
    return (op.split(".")[1] if "." in op else op) in names.split("|")
