"""What of ``torch.cuda`` is simulated, and the clear refusal of everything else.

Nothing may fall through to the CPU in silence. So this is a list of what works; whatever else
``torch.cuda`` has, in this version of PyTorch or the next, raises ``NotImplementedError`` with its name.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from crosscurrent.trace.patches import Patches
    from crosscurrent.trace.simulate.simulation import Simulation

_SIMULATED = """
    AcceleratorError CUDAGraph Event OutOfMemoryError Stream StreamContext
    can_device_access_peer cudart check_error current_device current_stream default_generators
    default_stream device device_count device_of empty_cache get_allocator_backend get_arch_list
    get_device_capability get_device_name get_device_properties get_gencode_flags
    get_per_process_memory_fraction get_rng_state get_rng_state_all get_sync_debug_mode graph
    graph_pool_handle init initial_seed ipc_collect is_available is_bf16_supported
    is_current_stream_capturing is_initialized is_tf32_supported make_graphed_callables manual_seed
    manual_seed_all max_memory_allocated max_memory_cached max_memory_reserved mem_get_info
    memory_allocated memory_cached memory_reserved memory_stats memory_stats_as_nested_dict
    memory_summary reset_accumulated_memory_stats reset_max_memory_allocated reset_max_memory_cached
    reset_peak_memory_stats seed seed_all set_device set_per_process_memory_fraction set_rng_state
    set_rng_state_all set_stream set_sync_debug_mode stream synchronize
"""
_HARMLESS = """
    Any Callable CudaError DEVICE_REQUIREMENT DeferredCudaCallError Device NewType Optional
    PYTORCH_RELEASES_CODE_CC TYPE_CHECKING amp cast classproperty cudaStatus gds graphs green_contexts
    has_half has_magma importlib jiterator lru_cache memory nccl nvtx os platform profiler random sparse
    streams threading torch traceback tunable warnings comm
"""

SIMULATED = frozenset(_SIMULATED.split())
"""Public names of ``torch.cuda`` that work."""

HARMLESS = frozenset(_HARMLESS.split())
"""Public names that are no functions of a device: types, constants, modules."""

_MODULES = {
    "gds": ("GdsFile", "gds_register_buffer", "gds_deregister_buffer"),
    "green_contexts": ("GreenContext",),
    "jiterator": ("_create_jit_fn", "_create_multi_output_jit_fn"),
    "memory": (
        "CUDAPluggableAllocator", "MemPool", "change_current_allocator", "use_mem_pool", "memory_snapshot",
        "caching_allocator_alloc", "caching_allocator_delete", "caching_allocator_enable",
        "caching_allocator_disabled", "host_memory_stats", "host_memory_stats_as_nested_dict",
        "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats", "list_gpu_processes",
        "_record_memory_history", "_snapshot", "_dump_snapshot", "_get_current_allocator",
        "_set_memory_metadata", "_get_memory_metadata", "_use_uvm",
    ),
    "nccl": ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "init_rank", "unique_id"),
    "streams": ("ExternalStream",),
}  # fmt: skip
"""Names inside the modules of ``torch.cuda`` that are refused."""

_BINDINGS = (
    "_broadcast",
    "_broadcast_out",
    "_broadcast_coalesced",
    "_scatter",
    "_scatter_out",
    "_gather",
    "_gather_out",
)
"""C++ functions behind ``torch.nn.parallel`` and ``torch.cuda.comm``."""

SETTINGS = {
    "_cuda_clearCublasWorkspaces", "_cuda_get_conv_benchmark_empty_cache", "_cuda_get_cudnn_benchmark_limit",
    "_cuda_isHistoryEnabled", "_cuda_set_cudnn_benchmark_limit",
}  # fmt: skip
"""C++ functions of a build with CUDA that ask no device."""

_TENSORS = {
    "BFloat16": torch.bfloat16, "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8,
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "Int": torch.int32,
    "Long": torch.int64, "Short": torch.int16,
}  # fmt: skip


def refuse(name: str) -> Any:
    """Something to put in the place of ``name``, which raises whatever one does with it."""

    class Refused:
        """Not simulated."""

        def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"simulated CUDA has no {name}")

    Refused.__name__ = Refused.__qualname__ = name.rpartition(".")[2]
    return Refused


def refuse_bindings(patches: Patches) -> None:
    """Refuse all C++ functions behind ``torch.cuda``, of which a CPU build has none; some come back after."""
    for name, value in list(vars(torch._C).items()):
        if name.startswith("_cuda_") and name not in SETTINGS and not isinstance(value, type):
            patches.set(torch._C, name, refuse(f"torch._C.{name}"))


def refuse_the_rest(simulation: Simulation, patches: Patches) -> None:
    """Replace what is not simulated by its refusal, and what has no effect by nothing."""
    cuda = torch.cuda
    for name in dir(cuda):
        value = getattr(cuda, name)
        if name.startswith("_") or name in SIMULATED or name in HARMLESS:
            continue
        if name.endswith("Tensor") and name.removesuffix("Tensor") in _TENSORS:
            patches.set(cuda, name, _legacy_tensor(simulation, name, _TENSORS[name.removesuffix("Tensor")]))
        elif callable(value) or isinstance(value, types.ModuleType):
            patches.set(cuda, name, refuse(f"torch.cuda.{name}"))
    for module, names in _MODULES.items():
        owner = vars(cuda).get(module)
        for name in names:
            if owner is not None and hasattr(owner, name):
                patches.set(owner, name, refuse(f"torch.cuda.{module}.{name}"))
    for name in _BINDINGS:
        patches.set(torch._C, name, refuse(f"torch._C.{name} (torch.nn.parallel, torch.cuda.comm)"))
    if "Graph" in vars(torch.accelerator):
        patches.set(torch.accelerator, "Graph", refuse("torch.accelerator.Graph"))
    _refuse_tunable(patches)
    patches.set(cuda.nvtx, "_nvtx", _Nvtx())


def _refuse_tunable(patches: Patches) -> None:
    tunable = torch.cuda.tunable
    for name in tunable.__all__:
        patches.set(tunable, name, refuse(f"torch.cuda.tunable.{name}"))


class _Nvtx:
    """Marks for a profiler that is not there."""

    def __init__(self) -> None:
        self._depth = 0

    def rangePushA(self, message: str) -> int:  # noqa: N802 (NVTX's name)
        """Open a range; returns its depth."""
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:  # noqa: N802
        """Close the innermost range."""
        self._depth -= 1
        return self._depth

    def rangeStartA(self, message: str) -> int:  # noqa: N802
        """Open a range that need not nest."""
        return 0

    def rangeEnd(self, range_id: int) -> None:  # noqa: N802
        """Close it."""

    def markA(self, message: str) -> None:  # noqa: N802
        """Mark a moment."""

    def deviceRangeStart(self, message: str, stream: int) -> object:  # noqa: N802
        """Open a range on a stream."""
        return object()

    def deviceRangeEnd(self, handle: object, stream: int) -> None:  # noqa: N802
        """Close it."""


def _legacy_tensor(simulation: Simulation, name: str, dtype: torch.dtype) -> type:
    """A class such as ``torch.cuda.FloatTensor``: a constructor, and a type to compare with."""

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, Tensor) and instance.dtype is dtype and instance.is_cuda

    class Legacy(metaclass=Meta):
        """Makes tensors of one dtype on the current device."""

        def __new__(cls, *args: Any) -> Any:
            device = torch.device("cuda", simulation.device_index(None))
            if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
                return torch.tensor(args[0], dtype=dtype, device=device)
            return torch.empty(*args, dtype=dtype, device=device)

    Legacy.__name__ = Legacy.__qualname__ = name
    Legacy.__module__ = "torch.cuda"
    return Legacy
