"""Regions against brute force, the host allocator's cache, and the life of blocks."""

from __future__ import annotations

import _thread
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crosscurrent
from crosscurrent.trace.memory import HostCache, Layouts, is_one_run, region_of
from crosscurrent.trace.records import Alloc, Free, HostWait, MemoryKind, Op, Region, UseStream
from crosscurrent.trace.segments import Segments

LAYOUTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4)


def bytes_of_tensor(offset: int, dims: list[tuple[int, int]], itemsize: int) -> set[int]:
    touched = set()
    for index in itertools.product(*(range(count) for count, _ in dims)):
        start = itemsize * (offset + sum(i * stride for i, (_, stride) in zip(index, dims, strict=True)))
        touched.update(range(start, start + itemsize))
    return touched


def bytes_of_region(region: Region) -> set[int]:
    touched = set()
    for index in itertools.product(*(range(count) for count, _ in region.dims)):
        start = region.start + sum(i * stride for i, (_, stride) in zip(index, region.dims, strict=True))
        touched.update(range(start, start + region.run))
    return touched


@given(st.integers(0, 7), LAYOUTS, st.sampled_from([1, 2, 4, 8]))
def test_region_holds_exactly_the_bytes_of_the_tensor(
    offset: int, dims: list[tuple[int, int]], itemsize: int
) -> None:
    shape, strides = tuple(count for count, _ in dims), tuple(stride for _, stride in dims)
    expected = bytes_of_tensor(offset, dims, itemsize)
    region = region_of(offset, shape, strides, itemsize)
    if not expected:
        assert region is None
        return
    assert region is not None
    assert bytes_of_region(region) == expected
    assert (region.start, region.stop) == (min(expected), max(expected) + 1)
    assert all(count >= 2 and stride >= region.run for count, stride in region.dims)
    assert list(region.dims) == sorted(region.dims, key=lambda dim: -dim[1])


def test_contiguous_tensors_are_one_run() -> None:
    assert region_of(3, (4, 5), (5, 1), 4) == Region(12, 92, 80)
    assert region_of(0, (5, 4), (1, 5), 4) == Region(0, 80, 80)  # transposed
    assert region_of(0, (4, 2), (5, 1), 4) == Region(0, 68, 8, ((4, 20),))


def test_layouts_are_interned_and_bounded() -> None:
    layouts = Layouts()
    tensor = torch.zeros(4, 5)[1:, :2]
    assert layouts.of(tensor) is layouts.of(tensor)
    assert layouts.of(tensor).dtype == "float32"
    for size in range(Layouts.LIMIT + 1):
        layouts.learn((torch.Size([size]), (1,), 0, torch.float32))
    assert len(layouts.known) <= Layouts.LIMIT


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=4), st.integers(0, 1))
def test_one_run_means_the_same_bytes_in_the_same_order(dims: list[tuple[int, int]], twist: int) -> None:
    shape, strides = [count for count, _ in dims], [stride for _, stride in dims]
    a = torch.zeros(400).as_strided(shape, strides)
    b = torch.zeros(shape) if twist else torch.zeros(400).as_strided(shape, strides)
    places = [_places(tensor) for tensor in (a, b)]
    order = sorted(range(a.numel()), key=places[0].__getitem__)
    runs = [[place[i] for i in order] for place in places]
    dense = all(run == list(range(run[0], run[0] + len(run))) for run in runs if run)
    assert is_one_run(a, b) == dense


def _places(tensor: torch.Tensor) -> list[int]:
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    indices = itertools.product(*(range(count) for count, _ in dims))
    return [sum(i * stride for i, (_, stride) in zip(index, dims, strict=True)) for index in indices]


def test_types_that_differ_are_no_run() -> None:
    assert is_one_run(torch.zeros(4), torch.zeros(4))
    assert not is_one_run(torch.zeros(4), torch.zeros(4, dtype=torch.float64))


def test_cache_serves_a_block_of_the_same_size_class() -> None:
    cache = HostCache()
    assert not cache.take(100)
    cache.freed(100, None)
    assert not cache.take(1000)
    assert cache.take(128)
    assert not cache.take(128)


def test_cache_keeps_a_block_until_its_copies_are_known_to_be_done() -> None:
    cache = HostCache()
    cache.freed(64, uses={1: 10})
    cache.waited(1, 9)
    assert not cache.take(64)
    cache.waited(2, 20)
    assert not cache.take(64)
    cache.waited(1, 10)
    assert cache.take(64)


def test_blocks_live_as_long_as_their_storages(run: Any) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda", requires_grad=True)
        y = x.exp()
        z = (y * y).sum()  # y is saved for backward
        del y
        gc.collect()
        view = x.detach()[1:]
        del x
        z.backward()
        del z
        view.add(1)

    records = run(program).records
    allocs = {r.block: r for r in records if isinstance(r, Alloc)}
    frees = [r.block for r in records if isinstance(r, Free)]
    assert len(set(frees)) == len(frees)
    assert all(alloc.memory is MemoryKind.DEVICE and alloc.fresh for alloc in allocs.values())
    freed: set[int] = set()
    for record in records:
        if isinstance(record, Free):
            freed.add(record.block)
        elif isinstance(record, Op):
            assert not freed & {access.block for access in record.accesses}, record


def test_memory_older_than_the_watch_is_not_fresh(machine: Any) -> None:
    with machine():
        old = torch.ones(4, device="cuda")
        with crosscurrent.watch(trace=True) as watch:
            old + 1
        fresh = [r.fresh for r in watch.records if isinstance(r, Alloc)]
    assert fresh == [False, True]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("driven", [False, True])
def test_memory_older_than_the_watch_goes_back_to_the_stream_that_it_came_from(
    request: Any, machine: Any, driven: bool, fixed: bool
) -> None:
    """Allocated on a stream for copies, used and freed on the main one: the next copy may come too early."""
    kept: dict[str, Any] = {}

    def before() -> None:
        kept["side"] = side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            kept["old"] = torch.ones(4, device="cuda")
        kept["other"] = torch.ones(4, device="cuda")
        torch.cuda.synchronize()

    def program() -> None:
        kept.pop("old").add_(kept.pop("other"))
        if fixed:
            kept["side"].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(kept["side"]):
            torch.zeros(4, device="cuda")
        torch.cuda.synchronize()

    if driven:
        watch = request.getfixturevalue("run_by_callbacks")(program, before=before)
    else:
        with machine():
            before()
            with crosscurrent.watch() as watch:
                program()
    assert [finding.kind.value for finding in watch.findings] == ([] if fixed else ["reuse"])


def test_segments_are_looked_up_again_for_an_address_in_none() -> None:
    first = [(0, 100, 50, 7), (0, 200, 50, 8), (1, 100, 50, 9)]
    told = [first, first, [(0, 300, 50, 6)], []]

    def look() -> list[dict[str, int]]:
        names = ("device", "address", "total_size", "stream")
        return [dict(zip(names, each, strict=True)) for each in told.pop(0)]

    segments = Segments(look, given_back=lambda device: 0)
    for device, address, stream in ((0, 100, 7), (0, 149, 7), (0, 249, 8), (1, 120, 9), (0, 200, 8)):
        assert segments.stream_of(device, address) == stream
    assert len(told) == 2
    assert segments.stream_of(0, 320) == 6
    assert segments.stream_of(0, 150) == 0
    assert not told


def test_segments_are_looked_up_again_once_memory_was_given_back_to_the_driver() -> None:
    """Its addresses may be in another stream's segment by now."""
    streams, given_back = [7, 8], {0: 0, 1: 0}
    segments = Segments(
        lambda: [{"device": 0, "address": 100, "total_size": 50, "stream": streams.pop(0)}],
        given_back.__getitem__,
    )
    assert segments.stream_of(0, 100) == 7
    given_back[1] += 50
    assert segments.stream_of(0, 100) == 7
    given_back[0] += 50
    assert [segments.stream_of(0, address) for address in (100, 120)] == [8, 8]


@pytest.mark.gpu
def test_memory_that_comes_again_from_the_driver_is_the_next_stream_s() -> None:
    segments, side = Segments(), torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), side):
        with torch.cuda.stream(stream):
            memory = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        assert segments.stream_of(memory.get_device(), memory.data_ptr()) == stream.cuda_stream
        del memory
        torch.cuda.empty_cache()


def test_resizing_moves_to_a_new_block(run: Any, kinds: Any) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda")
        x.resize_(8)  # grows: the content moves
        x.resize_(2)  # shrinks: nothing happens
        x.untyped_storage().resize_(0)

    records = run(program).records
    assert kinds(records) == ["Alloc", "Op", "Alloc", "Op", "Free", "Free"]
    move = records[3]
    assert [(access.block, access.write, access.region.stop) for access in move.accesses] == [
        (0, False, 16),
        (1, True, 16),
    ]
    assert [record.block for record in records[4:]] == [0, 1]


def test_storage_emptied_and_filled_again_is_a_new_block(run: Any) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda")
        storage = x.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        x.fill_(2)

    records = run(program).records
    blocks = [r.block for r in records if isinstance(r, Alloc)]
    assert len(set(blocks)) == 2
    assert records[-2].accesses[0].block == blocks[1]  # the last record is the free


def test_set_and_data_swap_touch_nothing(run: Any, ops: Any) -> None:
    def program() -> None:
        x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        x.set_(y)
        x.add_(1)
        z = torch.full((4,), 2.0, device="cuda")
        x.data = z
        x.mul_(2)

    watch = run(program)
    writes = [r.accesses[-1].block for r in watch.records if isinstance(r, Op)]
    assert [name for name, _, _ in ops(watch)] == ["ones", "zeros", "add_", "full", "mul_"]
    assert writes == [0, 1, 1, 2, 2]


def test_out_argument_that_grows_is_a_new_allocation(run: Any) -> None:
    def program() -> None:
        out = torch.empty(0, device="cuda")
        torch.add(torch.ones(4, device="cuda"), 1, out=out)

    records = run(program).records
    assert [r.nbytes for r in records if isinstance(r, Alloc)] == [16, 16]
    assert [r.accesses[-1].write for r in records if isinstance(r, Op)] == [True, True]


def grows_and_raises(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError):
        torch.cat([x, x], out=x)  # refused, but only once there is room for the result


def grows_unseen(x: torch.Tensor) -> None:
    @torch.library.custom_op("crosscurrent_test::doubles", mutates_args=["x"])
    def doubles(x: torch.Tensor) -> None:
        x.resize_(2 * x.numel())

    doubles(x)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("grow", [grows_and_raises, grows_unseen])
@pytest.mark.parametrize("source", ["run", "run_by_callbacks"])
def test_storage_that_an_op_makes_larger_is_seen_by_its_size(
    grow: Callable[[torch.Tensor], None], source: str, request: pytest.FixtureRequest
) -> None:
    """Were it taken to be as large as before, its two halves would be taken to be the same bytes."""

    def program() -> None:
        x = torch.ones(4, device="cuda")
        half = x[:4]
        half.add_(1)
        grow(x)
        x[4:].mul_(2)
        half.add_(1)

    watch = request.getfixturevalue(source)(program)
    touched = [
        (record.name, record.accesses[-1].region[:2])
        for record in watch.records
        if isinstance(record, Op) and record.name in ("aten.mul_.Tensor", "aten.add_.Tensor")
    ]
    assert touched == [
        ("aten.add_.Tensor", (0, 16)),
        ("aten.mul_.Tensor", (16, 32)),
        ("aten.add_.Tensor", (0, 16)),
    ]
    assert [record.nbytes for record in watch.records if isinstance(record, Alloc)][:2] == [16, 32]


def test_empty_with_an_out_argument_writes_nothing(run: Any, kinds: Any) -> None:
    """Only where it has to grow its argument, the old content moves along, as with ``resize_``."""

    def program(num: int) -> None:
        torch.empty(num, out=torch.empty(2, device="cuda"))

    assert kinds(run(program, 2).records) == ["Alloc", "Free"]
    assert kinds(run(program, 4).records) == ["Alloc", "Alloc", "Op", "Free", "Free"]


def test_zero_elements_are_no_memory(run: Any) -> None:
    def program() -> None:
        x = torch.zeros(0, device="cuda")
        x.add_(1)
        torch.cat([x, x])

    assert run(program).records == []


def test_record_stream_names_the_lane(run: Any) -> None:
    def program() -> None:
        stream = torch.cuda.Stream()
        torch.ones(4, device="cuda").record_stream(stream)

    watch = run(program)
    (use,) = [r for r in watch.records if isinstance(r, UseStream)]
    assert watch.lanes[use.lane].name != "cuda:0 default"


def test_second_pinned_buffer_of_a_size_comes_from_the_cache(run: Any) -> None:
    def program(wait: bool) -> None:
        x = torch.ones(4, device="cuda")
        for _ in range(2):
            host = torch.empty(4, pin_memory=True)
            host.copy_(x, non_blocking=True)
            if wait:
                torch.cuda.synchronize()
            del host

    def allocations(wait: bool) -> int:
        records = run(program, wait).records
        return sum(isinstance(r, HostWait) and r.kind == "allocation" for r in records)

    assert allocations(wait=True) == 1
    assert allocations(wait=False) == 2


def test_storage_that_dies_in_a_thread_without_python_frames_is_freed(machine: Any) -> None:
    """Autograd's threads release saved tensors with no Python code on their stack."""
    with machine(), crosscurrent.watch(trace=True) as watch:
        held = [torch.ones(4, device="cuda")]
        _thread.start_new_thread(held.clear, ())  # a thread in which C code is called, and nothing else
        for _ in range(100_000):
            torch.cuda.current_stream().record_event()  # frees are reported with the next call
            frees = [record for record in watch.records[-4:] if isinstance(record, Free)]
            if frees:
                break
    assert watch.info.sites[frees[0].site].file in ("<no Python frame>", __file__)
