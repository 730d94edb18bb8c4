"""The C++ half of ``torch.cuda`` and ``torch.accelerator``, on simulated devices.

PyTorch's own Python code stays in place and calls these; so functions that a program imported before the
simulation began work too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from crosscurrent.trace.simulate.clock import CYCLES_PER_MICROSECOND
from crosscurrent.trace.simulate.graphs import new_pool
from crosscurrent.trace.simulate.streams import CUDA_DEVICE_TYPE, generic_stream

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.memory import DeviceMemory
    from crosscurrent.trace.simulate.simulation import Simulation


_DTYPES = tuple(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_COUNTS = ("current", "peak", "allocated", "freed")


class DeviceProperties(NamedTuple):
    """What ``torch.cuda.get_device_properties`` returns: a simulated device shaped like an H200."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int = 132
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 60 << 20
    memory_bus_width: int = 6144
    memory_clock_rate: int = 3201000
    clock_rate: int = CYCLES_PER_MICROSECOND * 1000
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""
    uuid: str = "00000000-0000-0000-0000-000000000000"
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0


def cuda_bindings(simulation: Simulation) -> dict[str, object]:
    """Replacements for the functions ``torch._C._cuda_...``."""
    return {
        "_has_cuda": True,
        "_has_cudnn": False,  # nothing asks it for a recurrent layer, say: that runs on the CPU
        **_devices(simulation),
        **_streams(simulation),
        **_allocator(simulation),
        **_settings(simulation),
    }


def _devices(simulation: Simulation) -> dict[str, object]:
    thread = simulation.queues.thread

    def exchange(device: int) -> int:
        previous = thread.device
        if device >= 0:
            thread.device = simulation.device_index(device)
        return previous

    def set_device(device: int) -> None:
        exchange(device)

    def synchronize() -> None:
        simulation.synchronize(thread.device)

    def set_sync_debug_mode(mode: int) -> None:
        simulation.sync_debug_mode = mode

    def sleep(cycles: int) -> None:
        queue = thread.current[thread.device]
        queue.launch(simulation.clock, cycles * 1000 // CYCLES_PER_MICROSECOND)

    return {
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": lambda: simulation.num_devices,
        "_cuda_getDevice": lambda: thread.device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": lambda device: exchange(device),  # a function of its own
        "_cuda_synchronize": synchronize,
        "_cuda_sleep": sleep,
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_isInBadFork": lambda: simulation.forked,
        "_cuda_get_sync_debug_mode": lambda: simulation.sync_debug_mode,
        "_cuda_set_sync_debug_mode": set_sync_debug_mode,
        "_cuda_ipc_collect": lambda: None,
        "_get_accelerator": lambda *args: torch.device("cuda"),
    }


def _streams(simulation: Simulation) -> dict[str, object]:
    queues = simulation.queues

    def current_stream(device: int) -> tuple[int, int, int]:
        simulation.settle()
        queue = queues.thread.current[simulation.device_index(device)]
        return queue.stream_id, queue.device, CUDA_DEVICE_TYPE

    def default_stream(device: int) -> tuple[int, int, int]:
        return 0, simulation.device_index(device), CUDA_DEVICE_TYPE

    def raw_stream(device: int) -> int:
        simulation.settle()
        return queues.thread.current[simulation.device_index(device)].handle

    def set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
        simulation.settle()
        # Setting a stream makes its device the current one, as in CUDA.
        queues.thread.device = device_index
        simulation.switch_to(queues.by_id(device_index, stream_id))

    def external(pointer: int, device: int) -> Any:
        raise NotImplementedError("simulated CUDA cannot wrap a stream of another library")

    def is_capturing() -> bool:
        return simulation.captures.current() is not None

    return {
        "_cuda_getCurrentStream": current_stream,
        "_cuda_getDefaultStream": default_stream,
        "_cuda_getCurrentRawStream": raw_stream,
        "_cuda_setStream": set_stream,
        "_cuda_getStreamFromExternal": external,
        "_cuda_isCurrentStreamCapturing": is_capturing,
    }


def _allocator(simulation: Simulation) -> dict[str, object]:
    devices = simulation.memory.devices

    def stats(device: int) -> dict[str, Any]:
        return allocator_stats(devices[device])

    def info(device: int) -> tuple[int, int]:
        memory = devices[device]
        return memory.capacity - memory.reserved, memory.capacity

    def empty_cache() -> None:
        for memory in devices:
            memory.empty_cache()

    def reset_accumulated(device: int) -> None:
        memory = devices[device]
        memory.num_allocs = memory.num_frees = memory.num_ooms = 0
        memory.total_allocated = memory.total_freed = 0

    def set_fraction(fraction: float, device: int) -> None:
        devices[device].limit = int(devices[device].capacity * fraction)

    return {
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": lambda device: devices[device].reset_peak(),
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
        "_cuda_emptyCache": empty_cache,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda device: devices[device].limit / devices[device].capacity,
        "_host_emptyCache": lambda: None,
        "_graph_pool_handle": new_pool,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": empty_cache,
        "_accelerator_emptyHostCache": lambda: None,
        "_accelerator_getDeviceStats": stats,
        "_accelerator_getMemoryInfo": info,
        "_accelerator_resetPeakStats": lambda device: devices[device].reset_peak(),
        "_accelerator_resetAccumulatedStats": reset_accumulated,
    }


def allocator_stats(memory: DeviceMemory) -> dict[str, Any]:
    """The nested dictionary that ``torch.cuda.memory_stats`` flattens."""

    def pool(current: int, peak: int, allocated: int, freed: int) -> dict[str, Any]:
        counts = dict(zip(_COUNTS, (current, peak, allocated, freed), strict=True))
        return {
            "all": counts,
            "large_pool": dict.fromkeys(_COUNTS, 0),
            "small_pool": dict.fromkeys(_COUNTS, 0),
        }

    nothing = pool(0, 0, 0, 0)
    used = pool(memory.allocated, memory.peak, memory.total_allocated, memory.total_freed)
    blocks = pool(memory.active, memory.peak_active, memory.num_allocs, memory.num_frees)
    reserved = pool(memory.reserved, memory.peak_reserved, memory.reserved, 0)
    return {
        "allocation": blocks,
        "active": blocks,
        "allocated_bytes": used,
        "active_bytes": used,
        "requested_bytes": used,
        "reserved_bytes": reserved,
        "inactive_split_bytes": nothing,
        "inactive_split": nothing,
        "segment": nothing,
        "oversize_allocations": dict.fromkeys(_COUNTS, 0),
        "oversize_segments": dict.fromkeys(_COUNTS, 0),
        "num_alloc_retries": 0,
        "num_ooms": memory.num_ooms,
        "num_device_alloc": memory.num_allocs,
        "num_device_free": memory.num_frees,
        "num_sync_all_streams": 0,
        "max_split_size": -1,
    }


def _settings(simulation: Simulation) -> dict[str, object]:
    thread = simulation.queues.thread

    def get_stream(device: int) -> Any:
        simulation.settle()
        return generic_stream(thread.current[simulation.device_index(device)])

    def set_stream(stream: Any) -> None:
        simulation.settle()
        thread.device = stream.device_index
        simulation.switch_to(simulation.queues.by_id(stream.device_index, stream.stream_id))

    def set_device(device: int) -> None:
        thread.device = simulation.device_index(device)

    def exchange(device: int) -> int:
        previous = thread.device
        if device >= 0:
            thread.device = simulation.device_index(device)
        return previous

    def synchronize(device: int) -> None:
        simulation.synchronize(simulation.device_index(device))

    return {
        "_accelerator_getDeviceCapability": lambda device: {"supported_dtypes": set(_DTYPES)},
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: thread.device,
        "_accelerator_setDeviceIndex": set_device,
        "_accelerator_exchangeDevice": exchange,
        "_accelerator_maybeExchangeDevice": exchange,
        "_accelerator_getStream": get_stream,
        "_accelerator_setStream": set_stream,
        "_accelerator_synchronizeDevice": synchronize,
    }
