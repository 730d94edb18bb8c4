"""Kernels in the place of a CUDA graph's memset nodes.

Usage: `replace_memsets(graph.raw_cuda_graph())`, after the capture and before `instantiate`.

Libraries clear a counter of four bytes before many a product or attention. As a node of a graph that goes
to a copy engine: the device is idle for 5 microseconds on an H200, and for up to 20 where the engine is busy
with a transfer. A kernel takes one.

PyTorch has no way to edit a graph, so this speaks to the driver: CUDA Driver API, section "Graph Management".
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

_MEMSET_NODE = 2
_THREADS = 128

_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 target, .param .u64 bytes, .param .u32 value, .param .u32 element)
{
    .reg .pred %outside;
    .reg .b32 %r<7>;
    .reg .b64 %d<4>;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %d0, %r0, %r1;
    cvt.u64.u32 %d1, %r2;
    add.u64 %d0, %d0, %d1;
    ld.param.u64 %d2, [bytes];
    setp.ge.u64 %outside, %d0, %d2;
    @%outside ret;
    // The byte of the element that this thread writes.
    cvt.u32.u64 %r3, %d0;
    ld.param.u32 %r4, [element];
    rem.u32 %r3, %r3, %r4;
    shl.b32 %r3, %r3, 3;
    ld.param.u32 %r5, [value];
    shr.u32 %r5, %r5, %r3;
    ld.param.u64 %d3, [target];
    cvta.to.global.u64 %d3, %d3;
    add.u64 %d3, %d3, %d0;
    st.global.u8 [%d3], %r5;
    ret;
}
\0"""


class _Memset(ctypes.Structure):
    _fields_ = (
        ("target", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("parameters", ctypes.POINTER(c_void_p)),
        ("extra", ctypes.POINTER(c_void_p)),
    )


def replace_memsets(graph: int) -> int:
    """Replace the memset nodes of a `cudaGraph_t` of one row each. Says how many there were."""
    nodes = _list("cuGraphGetNodes", c_void_p(graph))
    return sum(_replace(c_void_p(graph), c_void_p(node)) for node in nodes)


def _replace(graph: c_void_p, node: c_void_p) -> bool:
    kind, memset = c_int(), _Memset()
    _call("cuGraphNodeGetType", node, byref(kind))
    if kind.value != _MEMSET_NODE:
        return False
    _call("cuGraphMemsetNodeGetParams", node, byref(memset))
    if memset.height != 1:
        return False
    before = _list("cuGraphNodeGetDependencies", node)
    after = _list("cuGraphNodeGetDependentNodes", node)
    num_bytes = memset.width * memset.element
    values = (
        c_uint64(memset.target),
        c_uint64(num_bytes),
        c_uint(memset.value),
        c_uint(memset.element),
    )
    pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    kernel = _Kernel(
        function=_function(_device()),
        grid=(c_uint * 3)(-(-num_bytes // _THREADS), 1, 1),
        block=(c_uint * 3)(_THREADS, 1, 1),
        shared_bytes=0,
        parameters=pointers,
        extra=None,
    )
    new = c_void_p()
    _call("cuGraphAddKernelNode", byref(new), graph, _array(before), c_size_t(len(before)), byref(kernel))
    _call(
        "cuGraphAddDependencies",
        graph,
        _array([new.value] * len(after)),
        _array(after),
        c_size_t(len(after)),
    )
    _call("cuGraphDestroyNode", node)
    return True


def _list(function: str, owner: c_void_p) -> list[int]:
    count = c_size_t()
    _call(function, owner, None, byref(count))
    found = (c_void_p * count.value)()
    _call(function, owner, found, byref(count))
    return [node for node in found if node is not None]


def _array(nodes: list[Any]) -> Any:
    return (c_void_p * len(nodes))(*nodes)


def _device() -> int:
    device = c_int()
    _call("cuCtxGetDevice", byref(device))
    return device.value


@functools.cache
def _function(device: int) -> int:
    """The kernel on a device, compiled by the driver; there for as long as the process."""
    module, function = c_void_p(), c_void_p()
    _call("cuModuleLoadData", byref(module), ctypes.c_char_p(_PTX))
    _call("cuModuleGetFunction", byref(function), module, ctypes.c_char_p(b"fill"))
    assert function.value is not None
    return function.value


@functools.cache
def driver() -> ctypes.CDLL | None:
    """NVIDIA's driver, or None on a machine without one, or without a device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def _call(function: str, *args: Any) -> None:
    loaded = driver()
    assert loaded is not None, "there is a CUDA graph, so there is a driver"
    # The first versions of these functions, which later drivers keep: edges without annotations.
    status = getattr(loaded, function)(*args)
    if status != 0:
        raise RuntimeError(f"{function} of the CUDA driver failed with status {status}")
