"""Activation offload: what autograd saves waits for the backward pass in pinned CPU memory.

    crosscurrent check --simulate examples/activation_offload.py          (on a GPU, leave out --simulate)

Activations go out while the forward pass goes on, and come back one ahead of the backward pass. Its racy
twin, ``activation_offload_racy.py``, lacks one line.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn


class OffloadedActivations(torch.autograd.graph.saved_tensors_hooks):
    """A context: what the forward pass in it saves for its backward pass is kept in pinned memory.

    Parameters stay where they are, and so does what is smaller than ``min_bytes``.
    """

    def __init__(self, *, min_bytes: int = 1 << 20) -> None:
        super().__init__(self._pack, self._unpack)
        self._min_bytes = min_bytes
        # One copy engine each way, next to the kernels.
        self._device_to_host = torch.cuda.Stream()
        self._host_to_device = torch.cuda.Stream()
        self._last: ref[_Saved] | None = None

    def _pack(self, tensor: Tensor) -> Any:
        if not tensor.is_cuda or isinstance(tensor, nn.Parameter) or tensor.nbytes < self._min_bytes:
            return tensor
        saved = _Saved(tensor, self._device_to_host, before=self._last)
        self._last = ref(saved)  # autograd alone keeps it alive
        return saved

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # The backward pass will ask for the one that was saved before this one next.
        for saved in (packed, packed.before and packed.before()):
            if saved is not None:
                saved.fetch(self._host_to_device)
        return packed.receive()


class _Saved:
    """One activation on its way out and back."""

    def __init__(self, tensor: Tensor, lane: torch.cuda.Stream, *, before: ref[_Saved] | None) -> None:
        self.before = before
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._device: Tensor | None = None
        self._home = tensor.device
        # Read after write: the kernel that makes this activation may not have run yet.
        lane.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane):
            self._host.copy_(tensor, non_blocking=True)
        # Reuse: autograd lets go of the activation now, and its memory is given away.
        tensor.record_stream(lane)
        self._sent = lane.record_event()

    def fetch(self, lane: torch.cuda.Stream) -> None:
        """Start to bring it back, if that was not done yet."""
        if self._device is not None:
            return
        self._device = torch.empty_like(self._host, device=self._home)
        # Reuse: what had this memory before may still be in use by the backward pass.
        lane.wait_stream(torch.cuda.current_stream())
        # Read after write: it may still be on its way out.
        lane.wait_event(self._sent)
        with torch.cuda.stream(lane):
            self._device.copy_(self._host, non_blocking=True)
        # Reuse: a graph that is thrown away frees what was fetched for nothing.
        self._device.record_stream(lane)
        self._arrived = lane.record_event()

    def receive(self) -> Tensor:
        """The activation, for work on the current stream. A second backward pass fetches it again."""
        assert self._device is not None, "fetched before"
        # Read after write: it may still be on its way in.
        torch.cuda.current_stream().wait_event(self._arrived)
        tensor, self._device = self._device, None
        return tensor


def main() -> list[Tensor]:
    """The gradients of a small network."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    network = nn.Sequential(*layers).to("cuda")
    with OffloadedActivations(min_bytes=1024):
        loss = network(torch.randn(32, 64, device="cuda")).square().mean()
    loss.backward()
    return [parameter.grad.cpu() for parameter in network.parameters() if parameter.grad is not None]


if __name__ == "__main__":
    print(*(gradient.norm() for gradient in main()))
