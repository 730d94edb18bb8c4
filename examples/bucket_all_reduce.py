"""Gradient buckets are averaged over all ranks on a side stream, while the backward pass goes on.

    crosscurrent check --simulate examples/bucket_all_reduce.py          (on a GPU, leave out --simulate)
    torchrun --nproc-per-node 8 examples/bucket_all_reduce.py            (on eight GPUs)

Its racy twin, ``bucket_all_reduce_racy.py``, lacks one line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def average(bucket: Tensor, num_samples: int) -> None:
    """Average sums over the samples of all ranks, in place, on the current stream."""
    world_size = 1
    if dist.is_initialized():
        dist.all_reduce(bucket)
        world_size = dist.get_world_size()
    bucket.div_(num_samples * world_size)


class BucketedAllReduce:
    """Keeps the gradients of a network in flat buckets, and averages each as soon as it is complete.

    The loss is the sum over ``num_samples`` samples on each rank. Every parameter must take part in every
    backward pass. After ``loss.backward()`` call ``finish()``, then step, then ``zero()``; the gradients must
    not be set to None.
    """

    def __init__(self, network: nn.Module, *, num_samples: int, bucket_size: int = 1 << 22) -> None:
        self._num_samples = num_samples
        # The backward pass completes the last parameters first.
        parameters = [p for p in reversed(list(network.parameters())) if p.requires_grad]
        self._lane = torch.cuda.Stream()
        self._buckets: list[Tensor] = []
        self._missing: list[int] = []
        self._sizes: list[int] = []
        members: list[nn.Parameter] = []
        for index, parameter in enumerate(parameters):
            members.append(parameter)
            if sum(p.numel() for p in members) >= bucket_size or index + 1 == len(parameters):
                self._add_bucket(members)
                members = []

    def _add_bucket(self, members: Sequence[nn.Parameter]) -> None:
        number = len(self._buckets)
        bucket = torch.zeros(sum(p.numel() for p in members), device="cuda")
        for parameter, part in zip(members, bucket.split([p.numel() for p in members]), strict=True):
            parameter.grad = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _: self._arrived(number))
        self._buckets.append(bucket)
        self._sizes.append(len(members))
        self._missing.append(len(members))

    def _arrived(self, number: int) -> None:
        self._missing[number] -= 1
        if self._missing[number]:
            return
        self._missing[number] = self._sizes[number]
        # Read after write: the last gradient of the bucket may not have been added yet.
        self._lane.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._lane):
            average(self._buckets[number], self._num_samples)

    def finish(self) -> None:
        """Let the current stream come after all averages."""
        # Read after write: the optimizer reads what the side stream averages.
        torch.cuda.current_stream().wait_stream(self._lane)

    def zero(self) -> None:
        """Start over, for the next backward pass."""
        for bucket in self._buckets:
            bucket.zero_()


def main() -> list[Tensor]:
    """The parameters of a small network after three steps."""
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to("cuda")
    inputs = torch.randn(64, 16, device="cuda")
    reducer = BucketedAllReduce(network, num_samples=len(inputs), bucket_size=64)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(3):
        network(inputs).square().sum().backward()
        reducer.finish()
        optimizer.step()
        reducer.zero()
    return [parameter.detach().cpu() for parameter in network.parameters()]


if __name__ == "__main__":
    print(*(parameter.norm() for parameter in main()))
    if dist.is_initialized():
        dist.destroy_process_group()
