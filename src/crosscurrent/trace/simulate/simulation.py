"""A simulation: its state, and what it does to PyTorch while it is active."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils import _python_dispatch

from crosscurrent.checks import whole_number
from crosscurrent.trace.patches import Patches
from crosscurrent.trace.simulate.capture import Captures
from crosscurrent.trace.simulate.clock import Clock
from crosscurrent.trace.simulate.current import active, make_active
from crosscurrent.trace.simulate.dispatch import SimulatedDispatch
from crosscurrent.trace.simulate.environment import Environment
from crosscurrent.trace.simulate.generators import RandomNumbers
from crosscurrent.trace.simulate.install import install
from crosscurrent.trace.simulate.memory import DEFAULT_CAPACITY, Memory
from crosscurrent.trace.simulate.queues import Queue, Queues
from crosscurrent.trace.simulate.streams import Event, query_cost
from crosscurrent.trace.simulate.taps import Taps

MOST_DEVICES = 120
"""PyTorch keeps a device's number in 8 bits, and has room for this many (C10_COMPILE_TIME_MAX_GPUS)."""


def simulate(devices: int = 1, *, capacity: int = DEFAULT_CAPACITY) -> Simulation:
    """Make ``torch.cuda`` work on this machine, without a GPU, inside a ``with`` statement.

    ``devices`` is the number of simulated devices, ``capacity`` the bytes of memory of each. Programs run
    unchanged and in program order, on CPU memory. Raises ``RuntimeError`` where a real CUDA device can be
    used, unless ``CUDA_VISIBLE_DEVICES=`` hides it, or when a simulation is active already.
    """
    return Simulation(devices, capacity)


class Simulation:
    """Simulated CUDA devices. A context manager, for one use."""

    def __init__(self, devices: int = 1, capacity: int = DEFAULT_CAPACITY) -> None:
        devices = whole_number("devices", devices, least=1)
        if devices > MOST_DEVICES:
            raise ValueError(f"devices must be at most {MOST_DEVICES}, as PyTorch allows, got {devices}")
        capacity = whole_number("capacity", capacity, least=1, unit=" byte")
        self.num_devices = devices
        self.capacity = capacity
        self.clock = Clock()
        self.queues = Queues(devices)
        self.memory = Memory(self.queues, capacity)
        self.tracers: list[Taps] = []
        self.is_active = False
        self.attention = 0
        self.captures = Captures(self)
        self.random = RandomNumbers(devices)
        self.forked = False
        self.sync_debug_mode = 0
        self.environment = Environment(self)
        self.mode = SimulatedDispatch(self)
        self._patches = Patches()
        self._thread: int | None = None
        self._last_poll: tuple[object, int] = (None, 0)

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError("this simulation was entered before; make a new one with simulate()")
        if active() is not None:
            raise RuntimeError("a simulation is active already; leave it before entering another one")
        _refuse_real_cuda()
        self._thread = threading.get_ident()
        try:
            install(self, self._patches)
            self.mode.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._patches.close()
            raise
        make_active(self)
        self.is_active = True
        self.queues.thread.adopted = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._check_leaving()
        self.is_active = False
        self.attend(+1)  # for good: threads that go on have to notice that it is over
        make_active(None)
        try:
            self.mode.__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        finally:
            self._patches.close()

    def _check_leaving(self) -> None:
        if not self.is_active:
            raise RuntimeError("this simulation is not active: it was left before, or never entered")
        if self._thread != threading.get_ident():
            raise RuntimeError("a simulation has to be left by the thread that entered it")
        if self.tracers:
            raise RuntimeError("something still watches this simulation: leave watch() before simulate()")
        if _python_dispatch._get_current_dispatch_mode() is not self.mode:
            raise RuntimeError(
                "simulate() is left before a context that was entered inside it: leave contexts in "
                "reverse order"
            )

    # For tracers

    def attach(self, tracer: Taps) -> None:
        """Tell a tracer about everything from now on."""
        self.tracers = [*self.tracers, tracer]

    def detach(self, tracer: Taps) -> None:
        """Tell it nothing any more."""
        self.tracers = [other for other in self.tracers if other is not tracer]

    def before_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let those who want values see them before an op runs."""
        for tracer in self.tracers:
            if tracer.observers and not self.queues.thread.quiet:
                tracer.before(func, args, kwargs)

    def check_thread(self) -> None:
        """Raise where nothing can be simulated: in a forked process, or in a thread that is too old."""
        if self.forked:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
                "use the 'spawn' start method"
            )
        thread = self.queues.thread
        if not thread.adopted:
            if self.mode not in _python_dispatch._get_current_dispatch_mode_stack():
                raise RuntimeError(
                    "this thread began before simulate(), which cannot see what it does: start threads and "
                    "pools inside of simulate()"
                )
            thread.adopted = True  # a thread of the autograd engine, which takes the modes along

    # Devices, streams, time

    def device_index(self, device: Any) -> int:
        """The index of a device given as number, name, ``torch.device`` or None (the current one)."""
        self.check_thread()
        if type(device) is torch.device and device.type == "cuda":
            place = self.queues.thread.device if device.index is None else device.index
            if 0 <= place < self.num_devices:
                return place
        if device is None:
            return self.queues.thread.device
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != "cuda":
                raise ValueError(f"expected a CUDA device, got {device}")
            device = self.queues.thread.device if device.index is None else device.index
        index = int(device)
        if not 0 <= index < self.num_devices:
            raise torch.AcceleratorError(
                f"CUDA error: invalid device ordinal: {index}, of {self.num_devices} simulated devices"
            )
        return index

    def full_device(self, device: Any) -> torch.device | None:
        """A device with its index, as ``Tensor.device`` says it; None stays None."""
        if device is None:
            return None
        if isinstance(device, int):
            return torch.device("cuda", self.device_index(device))
        device = torch.device(device)
        if device.type == "cuda":
            return torch.device("cuda", self.device_index(device))
        return torch.device("cpu") if device.type == "cpu" else device

    def switch_to(self, queue: Queue, since: int | None = None) -> None:
        """Make a queue the current one of its device, for this thread; see ``StreamLog.changed``."""
        thread = self.queues.thread
        thread.current[queue.device] = queue
        thread.logs[queue.device].changed(queue, since)

    def restore_streams(
        self, current: list[Queue], device: int | None = None, since: int | None = None
    ) -> None:
        """Make these the current streams of this thread, one per device, and ``device`` the current one."""
        thread = self.queues.thread
        for index, queue in enumerate(current):
            if thread.current[index] is not queue:
                self.switch_to(queue, since)
        if device is not None:
            thread.device = device

    def attend(self, change: int) -> None:
        """Count what needs a closer look at each op: captures, and backward passes on several streams."""
        self.attention += change

    def settle(self) -> None:
        """Bring the current stream up to date, in case a node of a backward pass has just begun."""
        run = self.queues.thread.backward
        if run is not None:
            run.settle()

    def record_internal(self, queue: Queue, via: str = "backward") -> Event:
        """PyTorch itself records an event."""
        event = Event()
        event._record_on(queue, via)
        return event

    def wait_internal(self, event: Event, queue: Queue, via: str = "backward") -> None:
        """PyTorch itself makes a stream wait for an event."""
        event._wait_on(queue, via)

    def synchronize(self, device: int) -> None:
        """The host waits for a device."""
        self.captures.refuse("cudaDeviceSynchronize")
        for queue in self.queues.of_device(device):
            self.clock.wait_until(queue.free_at)
        for tracer in self.tracers:
            tracer.device_synchronized(device)

    def poll(self, what: object, done_at: int) -> bool:
        """Whether a moment has passed; asking takes time, more each time in a row."""
        last, failures = self._last_poll
        failures = failures if last is what else 0
        self.clock.now += query_cost(failures)
        done = done_at <= self.clock.now
        self._last_poll = (None, 0) if done else (what, failures + 1)
        return done

    def note_wait(self) -> None:
        """An op makes the host wait; ``torch.cuda.set_sync_debug_mode`` may want to hear of it."""
        if self.sync_debug_mode == 1:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        elif self.sync_debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    @contextmanager
    def muted(self) -> Iterator[None]:
        """What this thread does meanwhile takes no time, and tracers hear nothing of it."""
        thread = self.queues.thread
        thread.quiet += 1
        try:
            yield
        finally:
            thread.quiet -= 1

    # Threads

    def run_thread(self, run: Any) -> None:
        """Run a new thread's work under the simulation."""
        _python_dispatch._push_mode(self.mode)
        self.queues.thread.adopted = True
        try:
            run()
        finally:
            _python_dispatch._pop_mode()


def _after_fork() -> None:
    simulation = active()
    if simulation is not None:
        simulation.forked = True


os.register_at_fork(after_in_child=_after_fork)


def _refuse_real_cuda() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "CUDA is in use in this process: simulate() would mix real and simulated devices. "
            "Leave simulate() out here, or simulate in a process of its own."
        )
    num_devices = _num_real_devices()
    if num_devices:
        raise RuntimeError(
            f"this process can use {num_devices} real CUDA device(s), which simulate() would mix with "
            "simulated ones. Leave simulate() out, or hide them: start the process with "
            "CUDA_VISIBLE_DEVICES= (an empty list) in its environment."
        )


def _num_real_devices() -> int:
    """How many devices this process can use now or later: the CUDA runtime lists them once per process."""
    count = vars(torch._C).get("_cuda_getDeviceCount")  # a CPU build has none
    return 0 if count is None else int(count())
