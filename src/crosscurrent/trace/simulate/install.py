"""Puts the simulation in the place of the C++ half of ``torch.cuda``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorConverter

from crosscurrent.trace.hidden_reads import hidden_reads
from crosscurrent.trace.simulate import events, generators, graphs, streams
from crosscurrent.trace.simulate.autocast import patch_autocast
from crosscurrent.trace.simulate.autograd import patch_functions
from crosscurrent.trace.simulate.bindings import DeviceProperties, cuda_bindings
from crosscurrent.trace.simulate.children import patch_children
from crosscurrent.trace.simulate.cpp_classes import install_classes
from crosscurrent.trace.simulate.engine import Engine
from crosscurrent.trace.simulate.factories import patch_factories
from crosscurrent.trace.simulate.refusals import refuse, refuse_bindings, refuse_the_rest
from crosscurrent.trace.simulate.storages import storage_methods
from crosscurrent.trace.simulate.tensor_makers import maker_methods
from crosscurrent.trace.simulate.tensors import tensor_methods

if TYPE_CHECKING:
    from crosscurrent.trace.patches import Patches
    from crosscurrent.trace.simulate.simulation import Simulation


def install(simulation: Simulation, patches: Patches) -> None:
    """Replace everything that the simulation replaces. ``patches`` knows the way back."""
    _install_classes(patches)
    refuse_bindings(patches)
    bindings = cuda_bindings(simulation)
    patches.update(torch._C, bindings)
    for name in ("_cuda_isCurrentStreamCapturing", "_graph_pool_handle"):
        patches.set(torch.cuda.graphs, name, bindings[name])
    patches.set(torch.cuda.graph, "default_capture_stream", None)
    patches.set(torch, "Generator", generators.Generator)
    patches.set(torch.cuda, "default_generators", simulation.random.defaults)
    variable: Any = sys.modules["torch.autograd.variable"].Variable  # a function hides the module
    patches.set(variable, "_execution_engine", Engine(simulation, vars(variable)["_execution_engine"]))
    _install_cuda_module(simulation, patches)
    patches.update(torch.Tensor, tensor_methods(simulation) | maker_methods(simulation))
    patches.update(torch.UntypedStorage, storage_methods(simulation))
    for owner, name, make in hidden_reads(lambda: simulation.tracers):
        patches.replace(owner, name, make)
    patch_factories(simulation, patches)
    _install_threads(simulation, patches)
    patch_children(simulation, patches)
    _install_parsing(patches)
    _install_grouping(patches)
    _install_compile(patches)
    _install_fakes(simulation, patches)
    _install_dlpack(simulation, patches)
    _install_attention(patches)
    _install_one_hot(patches)
    patch_autocast(patches)
    patch_functions(simulation, patches)
    refuse_the_rest(simulation, patches)


def _install_classes(patches: Patches) -> None:
    install_classes(patches, streams.StreamMethods, events.EventMethods, graphs.GraphMethods)
    for module in (torch, torch._C):
        patches.set(module, "Stream", streams.Stream)
        patches.set(module, "Event", streams.Event)


def _install_cuda_module(simulation: Simulation, patches: Patches) -> None:
    cuda = torch.cuda

    def properties(device: int) -> DeviceProperties:
        total = simulation.memory.devices[device].capacity
        return DeviceProperties(f"Simulated CUDA device {device}", 9, 0, total)

    patches.update(
        cuda,
        {
            "_initialized": True,
            "_cached_device_count": simulation.num_devices,
            "_get_device_properties": properties,
            "_cudart": _Runtime(simulation),
            "_is_in_bad_fork": lambda: simulation.forked,
            "_exchange_device": vars(torch._C)["_cuda_exchangeDevice"],
            "_maybe_exchange_device": vars(torch._C)["_cuda_maybeExchangeDevice"],
            "_lazy_init": lambda: None,
        },
    )


class _Runtime:
    """The few functions of the CUDA runtime that programs call through ``torch.cuda.cudart()``."""

    class cudaError:  # noqa: N801 (CUDA's name)
        """Codes of errors."""

        success = 0

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        """Free and total memory of a device."""
        memory = self._simulation.memory.devices[device]
        return memory.capacity - memory.reserved, memory.capacity

    def cudaProfilerStart(self) -> int:  # noqa: N802
        """There is no profiler: nothing starts."""
        return self.cudaError.success

    def cudaProfilerStop(self) -> int:  # noqa: N802
        """Nothing stops."""
        return self.cudaError.success

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cuda"):
            return refuse(f"torch.cuda.cudart().{name}")
        raise AttributeError(name)


def _install_threads(simulation: Simulation, patches: Patches) -> None:
    real: Callable[[threading.Thread], None] = vars(threading.Thread)["_bootstrap_inner"]

    def bootstrap(self: threading.Thread) -> None:
        simulation.run_thread(lambda: real(self))

    patches.set(threading.Thread, "_bootstrap_inner", bootstrap)


def _install_parsing(patches: Patches) -> None:
    """``Module.to`` and the optimizers ask C++ code what a device is."""
    real_parse = torch._C._nn._parse_to

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        return real_parse(*args, **kwargs)

    patches.set(torch._C._nn, "_parse_to", parse_to)


def _install_one_hot(patches: Patches) -> None:
    """On the CPU it looks at the values, which would make the host wait; on a GPU it does not."""
    real = torch._C._nn.one_hot

    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if num_classes <= 0 or not tensor.is_cuda:
            encoded: torch.Tensor = real(tensor, num_classes)
            return encoded
        zeros = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    patches.replace_builtin(torch._C._nn, "one_hot", one_hot)
    patches.set(torch.nn.functional, "one_hot", one_hot)


def _install_dlpack(simulation: Simulation, patches: Patches) -> None:
    module: Any = torch.utils.dlpack
    real: Any = module.to_dlpack

    def to_dlpack(tensor: torch.Tensor) -> Any:
        if simulation.memory.device_of(tensor) >= 0:
            raise NotImplementedError(
                "simulated CUDA cannot share device memory (torch.utils.dlpack.to_dlpack)"
            )
        return real(tensor)

    patches.set(module, "to_dlpack", to_dlpack)
    patches.set(torch._C, "_to_dlpack", to_dlpack)


def _install_attention(patches: Patches) -> None:
    """Where a program allows only kernels that GPUs have, plain attention stands in for them."""
    real: Any = torch._C._nn.scaled_dot_product_attention

    @wraps(real)
    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        settings: Any = torch.backends.cuda
        if not query.is_cuda or settings.flash_sdp_enabled() or settings.math_sdp_enabled():
            out: torch.Tensor = real(query, *args, **kwargs)
            return out
        settings.enable_math_sdp(True)
        try:
            out = real(query, *args, **kwargs)
        finally:
            settings.enable_math_sdp(False)
        return out

    for owner in (torch._C._nn, torch.nn.functional):
        patches.replace_builtin(owner, "scaled_dot_product_attention", attention)


def _install_compile(patches: Patches) -> None:
    """Compiled functions run as they are written: a compiler would look for a real GPU."""

    def compile_nothing(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    patches.set(torch, "compile", compile_nothing)
    if "torch._dynamo" in sys.modules:
        patches.enter_context(torch.compiler.set_stance("force_eager"))


def _install_fakes(simulation: Simulation, patches: Patches) -> None:
    """A fake of a tensor is on the CPU, where the tensor really is, as those are that are made as fakes."""

    def converted(real: Callable[..., Any]) -> Callable[..., Any]:
        def from_real_tensor(*args: Any, **kwargs: Any) -> Any:
            with simulation.memory.laid_bare():
                return real(*args, **kwargs)

        return from_real_tensor

    patches.replace(FakeTensorConverter, "from_real_tensor", converted)


def _install_grouping(patches: Patches) -> None:
    """Optimizers and gradient clipping let C++ code sort tensors by device; it sees the CPU only."""
    real = torch._C._group_tensors_by_device_and_dtype

    def group(tensors: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
        groups: dict[Any, Any] = {}
        for (device, dtype), (lists, indices) in real(tensors, with_indices).items():
            for i, first in enumerate(lists[0]):
                key = (device if first is None else first.device), dtype
                columns, numbers = groups.setdefault(key, ([[] for _ in lists], []))
                for column, values in zip(columns, lists, strict=True):
                    if values:
                        column.append(values[i])
                if indices:
                    numbers.append(indices[i])
        return groups

    patches.set(torch._C, "_group_tensors_by_device_and_dtype", group)
