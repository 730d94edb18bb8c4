"""Measures one configuration, the flag off and on, in this process.

One set of parameters serves both: two models around the same modules, of which only the checkpoints in CPU
memory are their own. So nothing on the device belongs to the one that is not being measured.

What is measured, in this order:

1. warm: three steps of each flag; the first two issue op by op and capture what is a graph later. The third
   gives the peak memory: on the device what PyTorch's allocator had given out at most, parameters and
   gradients included, and what it holds for graphs; pinned what its pinned allocator had given out at most
   beyond what there was before (in simulation, which has none: what the model plans to take).
2. times: off and on alternately, several steps of each. Forward and backward seconds between CUDA events on
   the caller's stream, which waits for the transfers before each pass ends; host seconds between the calls
   and their returns.
3. right or wrong: one step of each under deterministic algorithms, compared bit for bit, warm again since
   these exchange kernels for others. Timings are taken without them: the others are slower.
4. overlap: one step of each under the profiler, warm once more, see `report.overlap` for the definitions.
   Where the host waited, one more says in which lines.
5. the roofline: the rates of this machine at the configuration's own shapes.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from crosscurrent.bench import rates as measured_rates
from crosscurrent.bench.comparison import Comparison, Outcome, compare
from crosscurrent.bench.configurations import Configuration
from crosscurrent.bench.counts import count
from crosscurrent.bench.measurements import FlagResult, Peaks, Profile, Result, StepTimes
from crosscurrent.bench.roofline import roofline
from crosscurrent.bits import ask_cublas, deterministic
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.report.overlap import Overlap
from crosscurrent.report.profile import overlap
from crosscurrent.trace.simulate import active, simulate

logger = logging.getLogger(__name__)

STAGES = 5
"""How often ``run`` tells its listener that it goes on to something else."""


def run(configuration: Configuration, *, on_stage: Callable[[str], None] = lambda _: None) -> Result:
    """Measure a configuration on this machine's CUDA device, or on a simulated one if it says so."""
    # Bits are compared later. On the GPUs of today this is also the default, so that it changes no timing.
    ask_cublas()

    def tell(stage: str) -> None:
        logger.info("%s: %s", configuration.name, stage)
        on_stage(stage)

    with simulate() if configuration.simulated and active() is None else nullcontext():
        try:
            return _run(configuration, tell)
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def _run(configuration: Configuration, on_stage: Callable[[str], None]) -> Result:
    bench = _Bench(configuration)
    on_stage("warm up")
    off_peaks, on_peaks = bench.warm(False), bench.warm(True)
    on_stage("time")
    off_times, on_times = bench.time(configuration.repeats)
    on_stage("compare the bits")
    comparison = bench.compare()
    on_stage("profile")
    off_profile, on_profile = bench.profile(False), bench.profile(True)
    bench.free()
    on_stage("roofline")
    counts = count(configuration)
    rates = measured_rates.measure(
        counts.products,
        dtype=configuration.dtype,
        copy_bytes=max(configuration.checkpoint_format().sizes().values()),
    )
    return Result(
        configuration=configuration,
        device=torch.cuda.get_device_name(),
        off=FlagResult(times=off_times, peaks=off_peaks, profile=off_profile),
        on=FlagResult(times=on_times, peaks=on_peaks, profile=on_profile),
        comparison=comparison,
        rates=rates,
        roofline=roofline(counts, rates),
    )


class _Bench:
    """The parameters, the batch, and a model for each flag."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._parts = make_parts(configuration, device="cuda")
        self._batch = _make_batch(configuration)
        self._models: dict[bool, LongContextGradientModel] = {}
        self._shared_bytes = torch.cuda.memory_allocated()

    def warm(self, flag: bool) -> Peaks:
        """Make the flag's model, warm it, and give the peaks of the step after that."""
        c = self._configuration
        for other in self._models.values():
            self._clear(other)
        pinned_before = _pinned_bytes("current")
        # What the other flag's model keeps, for its graphs and in their pool.
        others = torch.cuda.memory_allocated() - self._shared_bytes + _idle_in_graph_pools()
        gpt_model, head_model = self._parts
        model = LongContextGradientModel(gpt_model, head_model, cache=c.cache, grad=c.with_flag(flag))
        self._models[flag] = model
        self._warm_up(model)
        torch.cuda.reset_peak_memory_stats()
        if pinned_before is not None:
            torch.cuda.reset_peak_host_memory_stats()
        self._step(model)
        torch.cuda.synchronize()
        pinned = _pinned_bytes("peak")
        is_measured = pinned is not None and pinned_before is not None
        if pinned is None or pinned_before is None:
            budget = model.pinned_budget(batch_size=c.batch_size, sequence_length=c.sequence_length)
            pinned, pinned_before = budget.pinned, 0
        return Peaks(
            device=torch.cuda.max_memory_allocated() + _idle_in_graph_pools() - others,
            pinned=pinned - pinned_before,
            pinned_is_measured=is_measured,
        )

    def time(self, repeats: int) -> tuple[tuple[StepTimes, ...], tuple[StepTimes, ...]]:
        """Off and on alternately, so that whatever the machine does meanwhile, it does to both."""
        times: dict[bool, list[StepTimes]] = {False: [], True: []}
        gc.collect()  # what was left before is not to be collected in the middle of a step
        for _ in range(repeats):
            for flag in (False, True):
                times[flag].append(self._timed_step(self._models[flag]))
        return tuple(times[False]), tuple(times[True])

    def compare(self) -> Comparison:
        """One step of each flag under deterministic algorithms."""
        with deterministic():
            off, on = (self._outcome(self._models[flag]) for flag in (False, True))
            return compare(off, on)

    def profile(self, flag: bool) -> Profile:
        """One step under the profiler; a second one to say where the host waits, if it does."""
        undisturbed = self._profile(flag, call_sites=False)
        if not undisturbed.blocked_by:
            return Profile(overlap=undisturbed, waits=())
        return Profile(overlap=undisturbed, waits=self._profile(flag, call_sites=True).blocked_by)

    def _profile(self, flag: bool, *, call_sites: bool) -> Overlap:
        model = self._models[flag]
        self._warm_up(model)
        with overlap(call_sites=call_sites) as profiled:
            self._step(model)
        return profiled.result

    def free(self) -> None:
        """Give the memory back, for what comes next."""
        self._clear(self._models[False])
        self._models.clear()
        del self._parts
        gc.collect()

    def _warm_up(self, model: LongContextGradientModel) -> None:
        """Compute what later steps need but once, and leave no gradients."""
        for _ in range(2):
            self._clear(model)
            self._step(model)
        self._clear(model)
        torch.cuda.synchronize()

    def _step(self, model: LongContextGradientModel) -> Tensor:
        loss: Tensor = model(*self._batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _timed_step(self, model: LongContextGradientModel) -> StepTimes:
        self._clear(model)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call, unused-ignore]
        torch.cuda.synchronize()
        moments = [time.perf_counter()]
        marks[0].record()
        loss: Tensor = model(*self._batch)
        marks[1].record()
        moments.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        marks[2].record()
        moments.append(time.perf_counter())
        torch.cuda.synchronize()
        return StepTimes(
            forward=marks[0].elapsed_time(marks[1]) / 1000,
            backward=marks[1].elapsed_time(marks[2]) / 1000,
            host_forward=moments[1] - moments[0],
            host_backward=moments[2] - moments[1],
        )

    def _outcome(self, model: LongContextGradientModel) -> Outcome:
        self._warm_up(model)
        loss = self._step(model)
        gradients = {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        # The next step makes gradients of its own: these stay.
        self._clear(model)
        return Outcome(loss=loss, gradients=gradients)

    def _clear(self, model: LongContextGradientModel) -> None:
        model.zero_grad(set_to_none=True)


def make_parts(configuration: Configuration, *, device: str) -> tuple[Transformer, Head]:
    """The model and its head with random parameters, always the same on one kind of device."""
    # On a GPU they are drawn there: half a billion numbers take seconds on a CPU.
    maker = "cpu" if configuration.simulated else device
    with torch.random.fork_rng(), torch.device(maker):
        torch.manual_seed(0)
        parts = Transformer(configuration.model), Head(configuration.model)
    model, head = (part.to(device, configuration.dtype) for part in parts)
    assert isinstance(model, Transformer)
    assert isinstance(head, Head)
    return model, head


def _make_batch(configuration: Configuration) -> tuple[Tensor, Tensor]:
    """Random token ids, and targets for the last of them, in CPU memory."""
    draw = torch.Generator().manual_seed(1)
    size = configuration.batch_size, configuration.sequence_length
    ids = torch.randint(0, configuration.model.vocab_size, size, generator=draw)
    size = configuration.batch_size, configuration.num_targets
    targets = torch.randint(0, configuration.model.vocab_size, size, generator=draw)
    return ids, targets


def _pinned_bytes(when: str) -> int | None:
    """Pinned memory that PyTorch has given out, now or at most; None where it does not say."""
    if active() is not None:
        return None
    # Given out, and not "allocated_bytes": that is what the allocator owns, cached blocks included.
    given_out = torch.cuda.host_memory_stats().get(f"active_bytes.{when}")
    return None if given_out is None else int(given_out)


def _idle_in_graph_pools() -> int:
    """Bytes that PyTorch's allocator holds for CUDA graphs and counts as free: launches use them."""
    if active() is not None:
        return 0
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call, unused-ignore]
    of_graphs = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(int(segment["total_size"] - segment["allocated_size"]) for segment in of_graphs)


def with_repeats(configuration: Configuration, repeats: int | None) -> Configuration:
    """The configuration with another number of measured steps, if one is given."""
    return configuration if repeats is None else replace(configuration, repeats=repeats)
