"""A graph whose memset nodes were replaced does what it did, in the same order."""

from __future__ import annotations

from ctypes import c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p

import pytest
import torch

from crosscurrent.operators.memset_nodes import driver, replace_memsets

pytestmark = pytest.mark.gpu


def memset(x: torch.Tensor, value: int) -> None:
    """What PyTorch has no function for: any value, in elements of the size of x's."""
    name, number = {1: ("cuMemsetD8Async", c_ubyte), 2: ("cuMemsetD16Async", c_ushort)}.get(
        x.itemsize, ("cuMemsetD32Async", c_uint)
    )
    library = driver()
    assert library is not None
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    status = getattr(library, name)(c_uint64(x.data_ptr()), number(value), c_size_t(x.numel()), stream)
    assert status == 0


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.uint8, 0xA7), (torch.int16, 0x1234), (torch.int32, 0x12345678)], ids=str
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_every_byte_is_set_between_what_comes_before_and_after(
    dtype: torch.dtype, value: int, size: int
) -> None:
    x, seen = (
        torch.zeros(size + 2, dtype=dtype, device="cuda"),
        torch.zeros(size, dtype=torch.float64, device="cuda"),
    )
    inner = x[1:-1]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin()
        inner.add_(1)
        memset(inner, value)
        seen.copy_(inner)  # in another dtype: a kernel
        memset(inner, 0)
        inner.add_(3)
        graph.capture_end()
    assert replace_memsets(graph.raw_cuda_graph()) == 2
    assert replace_memsets(graph.raw_cuda_graph()) == 0
    graph.instantiate()
    for _ in range(3):
        graph.replay()
    assert seen.tolist() == [float(value)] * size
    assert x.tolist() == [0] + [3] * size + [0]


def test_branches_stay_ordered() -> None:
    """The memset waits for two branches, and two wait for it."""
    x = torch.zeros(4, dtype=torch.int32, device="cuda")
    left, right = torch.zeros_like(x), torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        graph.capture_begin()
        two.wait_stream(one)
        x[:2].add_(1)
        with torch.cuda.stream(two):
            x[2:].add_(2)
        one.wait_stream(two)
        memset(x, 7)
        two.wait_stream(one)
        left.copy_(x * 2)
        with torch.cuda.stream(two):
            right.copy_(x * 3)
        one.wait_stream(two)
        graph.capture_end()
    assert replace_memsets(graph.raw_cuda_graph()) == 1
    graph.instantiate()
    graph.replay()
    assert (x.tolist(), left.tolist(), right.tolist()) == ([7] * 4, [14] * 4, [21] * 4)
