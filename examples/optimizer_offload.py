"""Optimizer state offload: Adam's moments live in pinned CPU memory and visit the GPU for their update.

    crosscurrent check --simulate examples/optimizer_offload.py          (on a GPU, leave out --simulate)

While one parameter is updated, the moments of the next come in and those of the last go out. Its racy twin,
``optimizer_offload_racy.py``, lacks one line.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class OffloadedAdam:
    """Adam, with device memory for the moments of two parameters only."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self._parameters = list(parameters)
        self._lr, self._betas, self._eps = lr, betas, eps
        self._num_steps = 0
        # One copy engine each way, next to the kernels of the caller's stream.
        self._host_to_device = torch.cuda.Stream()
        self._device_to_host = torch.cuda.Stream()
        # Both moments of a parameter side by side: one contiguous copy each way.
        self._moments = [torch.zeros(2, p.numel(), pin_memory=True) for p in self._parameters]
        longest = max(p.numel() for p in self._parameters)
        self._slots = [torch.empty(2 * longest, device="cuda") for _ in range(2)]
        self._filled = [torch.cuda.Event() for _ in self._slots]
        self._drained = [torch.cuda.Event() for _ in self._slots]

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        self._num_steps += 1
        # Write after read: this stream may still use the slots, or what had their memory before.
        self._host_to_device.wait_stream(torch.cuda.current_stream())
        self._fetch(0)
        for index, parameter in enumerate(self._parameters):
            if index + 1 < len(self._parameters):
                self._fetch(index + 1)
            # Read after write: the moments may still be on their way in.
            torch.cuda.current_stream().wait_event(self._filled[index % 2])
            self._update(parameter, self._moments_in_slot(index))
            self._send(index)
        # Write after read: the next step, which begins after this stream, fills the slots again, which are
        # still on their way out. Reuse: who drops the optimizer frees them.
        torch.cuda.current_stream().wait_stream(self._device_to_host)

    def _moments_in_slot(self, index: int) -> Tensor:
        return self._slots[index % 2][: self._moments[index].numel()].view(2, -1)

    def _fetch(self, index: int) -> None:
        if index >= len(self._slots):
            # Write after read: the moments of the parameter before last may still be on their way out.
            self._host_to_device.wait_event(self._drained[index % 2])
        with torch.cuda.stream(self._host_to_device):
            self._moments_in_slot(index).copy_(self._moments[index], non_blocking=True)
            self._filled[index % 2].record()

    def _send(self, index: int) -> None:
        # Read after write: the update may not have run yet.
        self._device_to_host.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._device_to_host):
            self._moments[index].copy_(self._moments_in_slot(index), non_blocking=True)
            self._drained[index % 2].record()

    def _update(self, parameter: Tensor, moments: Tensor) -> None:
        assert parameter.grad is not None, "call backward() before step()"
        first, second = (moment.view_as(parameter) for moment in moments)
        rate, decay = self._betas
        first.lerp_(parameter.grad, 1 - rate)
        second.mul_(decay).addcmul_(parameter.grad, parameter.grad, value=1 - decay)
        root = (second / (1 - decay**self._num_steps)).sqrt_().add_(self._eps)
        parameter.addcdiv_(first, root, value=-self._lr / (1 - rate**self._num_steps))


def main() -> list[Tensor]:
    """The parameters of a small network after three steps."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to("cuda")
    inputs = torch.randn(64, 16, device="cuda")
    optimizer = OffloadedAdam(network.parameters(), lr=0.01)
    for _ in range(3):
        network.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in network.parameters()]


if __name__ == "__main__":
    print(*(parameter.norm() for parameter in main()))
