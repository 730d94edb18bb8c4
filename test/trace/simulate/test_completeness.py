"""Everything that ``torch.cuda`` has is simulated, harmless, or refused by name."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from crosscurrent.trace.simulate import Simulation
from crosscurrent.trace.simulate.refusals import HARMLESS, SETTINGS, SIMULATED

_TENSORS = {name for name in dir(torch.cuda) if name.endswith("Tensor")}


def _public() -> list[str]:
    return [name for name in dir(torch.cuda) if not name.startswith("_")]


@pytest.mark.simulation
@pytest.mark.parametrize("name", _public())
def test_every_public_name(name: str, simulation: Simulation) -> None:
    value = getattr(torch.cuda, name)
    if name in SIMULATED or name in HARMLESS:
        return
    if name in _TENSORS and not name.startswith("Complex"):
        assert value(2).is_cuda
        return
    with pytest.raises(NotImplementedError, match=name):
        value()


# How to call each simulated function; what is missing here is tested at length elsewhere.
CALLS: dict[str, tuple[Any, ...]] = {
    "can_device_access_peer": (0, 0),
    "cudart": (),
    "check_error": (0,),
    "current_device": (),
    "current_stream": (),
    "default_stream": (),
    "device": (0,),
    "device_count": (),
    "empty_cache": (),
    "get_allocator_backend": (),
    "get_arch_list": (),
    "get_device_capability": (),
    "get_device_name": (),
    "get_device_properties": (),
    "get_gencode_flags": (),
    "get_per_process_memory_fraction": (),
    "get_rng_state": (),
    "get_rng_state_all": (),
    "get_sync_debug_mode": (),
    "graph_pool_handle": (),
    "init": (),
    "initial_seed": (),
    "ipc_collect": (),
    "is_available": (),
    "is_bf16_supported": (),
    "is_current_stream_capturing": (),
    "is_initialized": (),
    "is_tf32_supported": (),
    "manual_seed": (1,),
    "manual_seed_all": (1,),
    "max_memory_allocated": (),
    "max_memory_reserved": (),
    "mem_get_info": (),
    "memory_allocated": (),
    "memory_reserved": (),
    "memory_stats": (),
    "memory_stats_as_nested_dict": (),
    "memory_summary": (),
    "reset_accumulated_memory_stats": (),
    "reset_peak_memory_stats": (),
    "seed": (),
    "seed_all": (),
    "set_device": (0,),
    "set_per_process_memory_fraction": (0.5,),
    "set_sync_debug_mode": (0,),
    "stream": (None,),
    "synchronize": (),
}


@pytest.mark.simulation
@pytest.mark.parametrize("name", CALLS)
def test_simulated_functions_can_be_called(name: str, simulation: Simulation) -> None:
    getattr(torch.cuda, name)(*CALLS[name])


# What ``torch.cuda`` has only since a release after the oldest that is supported.
SINCE = {
    "green_contexts": (2, 10),
    "DEVICE_REQUIREMENT": (2, 11),
    "Device": (2, 11),
    "PYTORCH_RELEASES_CODE_CC": (2, 11),
    "platform": (2, 13),
}


@pytest.mark.simulation  # of a build that can simulate
def test_the_lists_name_what_exists() -> None:
    names = set(dir(torch.cuda))
    known = SIMULATED | HARMLESS
    later = {name for name, release in SINCE.items() if torch.__version__ < release}
    # ``comm`` is a submodule, which is there once something has imported it.
    assert known - names - {"comm"} == later
    assert not SIMULATED & HARMLESS
    values = [getattr(torch.cuda, name) for name in HARMLESS & names]
    functions = [value for value in values if isinstance(value, types.FunctionType)]
    assert not [function for function in functions if function.__module__.startswith("torch.cuda")]


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: torch.cuda.memory.memory_snapshot(), "memory_snapshot"),
        (lambda: torch.cuda.memory._record_memory_history(), "_record_memory_history"),
        (lambda: torch.cuda.nccl.all_reduce([]), "all_reduce"),
        (lambda: torch.cuda.tunable.enable(), "enable"),
        (lambda: torch.cuda.jiterator._create_jit_fn(""), "_create_jit_fn"),
        (lambda: torch.cuda.cudart().cudaHostRegister(0, 0, 0), "cudaHostRegister"),
        (lambda: torch.nn.parallel.comm.broadcast(torch.ones(1, device="cuda"), [0]), "_broadcast"),
        (lambda: torch.cuda.Event(interprocess=True), "interprocess"),
        (lambda: torch.cuda.CUDAGraph().debug_dump("x"), "debug"),
    ],
)
def test_refusals_inside_modules(simulation: Simulation, call: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        call()


@pytest.mark.simulation
def test_no_cpp_function_of_a_build_with_cuda_is_left(simulation: Simulation) -> None:
    """All but settings are replaced or refused. A CPU build has none of them to begin with."""
    real = {
        name
        for name, value in vars(torch._C).items()
        if name.startswith("_cuda_") and isinstance(value, types.BuiltinFunctionType)
    }
    assert real <= SETTINGS


@pytest.mark.simulation
def test_graphs_are_simulated_below_their_python_class(simulation: Simulation) -> None:
    """What that takes and does differs between releases; what is in C++ is replaced or refused, all of it."""
    assert vars(torch.cuda.CUDAGraph)["capture_begin"].__module__ == "torch.cuda.graphs"
    below = {name: value for name, value in vars(torch._C._CUDAGraph).items() if not name.startswith("_")}
    assert "capture_begin" in below
    assert [name for name, value in below.items() if not isinstance(value, types.FunctionType | type)] == []


@pytest.mark.simulation
def test_marks_for_profilers_do_nothing(simulation: Simulation) -> None:
    assert torch.cuda.nvtx.range_push("outer") == 0
    with torch.cuda.nvtx.range("inner"):
        torch.cuda.nvtx.mark("here")
    assert torch.cuda.nvtx.range_pop() == 0
    with torch.cuda.profiler.profile():
        pass


@pytest.mark.simulation
@pytest.mark.filterwarnings("ignore:Use `.*_device_index` instead:FutureWarning")
@pytest.mark.parametrize("name", [name for name in dir(torch.accelerator) if not name.startswith("_")])
def test_every_name_of_the_accelerator(name: str, simulation: Simulation) -> None:
    value = getattr(torch.accelerator, name)
    if name == "Graph":
        with pytest.raises(NotImplementedError, match=r"torch.accelerator.Graph"):
            value()
    elif callable(value) and not isinstance(value, type) and value.__module__.startswith("torch.accelerator"):
        stream = torch.accelerator.current_stream()
        arguments: dict[str, tuple[Any, ...]] = {
            "set_device_idx": (0,),
            "set_device_index": (0,),
            "set_stream": (stream,),
        }
        value(*arguments.get(name, ()))
