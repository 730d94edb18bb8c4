"""Random numbers of simulated devices: generators of their own, apart from that of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from crosscurrent.trace.simulate.current import running

_RealGenerator: Any = torch._C.Generator
_simulated: WeakValueDictionary[int, CudaGenerator] = WeakValueDictionary()
"""By address of the C++ object: ops see a generator as a new Python object without our class."""


class CudaGenerator(_RealGenerator):  # type: ignore[misc]
    """A generator of a simulated device; it draws what a CPU generator with the same seed draws."""

    _device: torch.device

    def __new__(cls, device: torch.device) -> CudaGenerator:
        self: CudaGenerator = super().__new__(cls, device="cpu")
        self._device = device
        _simulated[self._cdata] = self
        return self

    def __init__(self, device: torch.device) -> None:
        pass

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._device

    def get_offset(self) -> int:
        """Not simulated."""
        raise NotImplementedError("simulated CUDA generators have no offset (Generator.get_offset)")

    def set_offset(self, offset: int) -> Any:
        """Not simulated."""
        raise NotImplementedError("simulated CUDA generators have no offset (Generator.set_offset)")

    def clone_state(self) -> CudaGenerator:
        """A generator that goes on from the same state."""
        clone = CudaGenerator(self._device)
        clone.set_state(self.get_state())
        return clone

    def graphsafe_get_state(self) -> CudaGenerator:
        """A generator that stands for the current state."""
        return self.clone_state()

    def graphsafe_set_state(self, state: Any) -> CudaGenerator:
        """Go on from a state that ``graphsafe_get_state`` returned."""
        self.set_state(state.get_state())
        return self

    def __reduce__(self) -> Any:
        return _restore, (self._device, self.get_state())


def _restore(device: torch.device, state: torch.Tensor) -> CudaGenerator:
    generator = CudaGenerator(device)
    generator.set_state(state)
    return generator


class _AlsoReal(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RealGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _RealGenerator)


class Generator(metaclass=_AlsoReal):
    """Stands for ``torch.Generator``: makes real generators for the CPU, simulated ones for CUDA."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if not isinstance(device, int) and torch.device(device).type != "cuda":
            return _RealGenerator(device=device)
        return CudaGenerator(torch.device("cuda", running().device_index(device)))


class RandomNumbers:
    """The default generators of the devices."""

    def __init__(self, num_devices: int) -> None:
        self.defaults = tuple(CudaGenerator(torch.device("cuda", i)) for i in range(num_devices))

    @contextmanager
    def drawing(self, device: int, func: Any, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The kwargs with which an op draws from the generator of ``device``."""
        given = kwargs.get("generator")
        if given is not None:
            if given._cdata not in _simulated:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            yield kwargs
            return
        generator = self.defaults[device]
        if any(argument.name == "generator" for argument in func._schema.arguments):
            yield {**kwargs, "generator": generator}
            return
        # An op that cannot be told: it draws from the CPU's generator, which stands in meanwhile.
        stand_in = torch.default_generator
        kept = stand_in.get_state()
        stand_in.set_state(generator.get_state())
        try:
            yield kwargs
            generator.set_state(stand_in.get_state())
        finally:
            stand_in.set_state(kept)


def check_on_host(kwargs: dict[str, Any]) -> None:
    """Raise if an op on the CPU is to draw from a CUDA generator."""
    given = kwargs.get("generator")
    if given is not None and given._cdata in _simulated:
        raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
