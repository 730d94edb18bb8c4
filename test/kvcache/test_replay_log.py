"""The replay log: what goes in comes back, from flat tensors in other memory too."""

from __future__ import annotations

import pytest
import torch

from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.kvcache.placement import GroupedEviction, SharedEviction
from crosscurrent.kvcache.policies import make_policy
from crosscurrent.kvcache.replay_log import (
    ReplayLog,
    flat_dtype,
    num_slots,
    pack_,
    same_decision,
    unpack,
)
from crosscurrent.operators.rows import slot_dtype

LENGTHS = [6, 2, 3, 1]


def record(name: str, *, seed: int = 0, cache_length: int | tuple[int, ...] = (6, 7)) -> ReplayLog:
    """Two layers, a few chunks; random weights decide for h2o."""
    generator = torch.Generator().manual_seed(seed)
    config = CacheConfig.from_name(name, cache_length=cache_length)
    log = ReplayLog(2)
    for layer in range(2):
        policy = make_policy(config, layer)
        policy.reset(2, 2, torch.device("cpu"))
        for length in LENGTHS:
            eviction = policy.place(length)
            log.append(layer, eviction)
            policy.observe(eviction, torch.rand(2, 2, eviction.filled_after, generator=generator))
    return log


@pytest.mark.parametrize("name", ["lastrec", "h2o"])
def test_every_eviction_is_recorded_in_order(name: str) -> None:
    log = record(name)
    assert len(log) == 2
    for layer in range(2):
        assert [eviction.chunk_length for eviction in log[layer]] == LENGTHS


@pytest.mark.parametrize("name", ["lastrec", "h2o"])
def test_a_round_trip_through_flat_memory(name: str) -> None:
    log, expected = record(name), record(name)
    for layers, chunks in ((range(2), range(2)), (range(1), range(2, 4)), (range(1, 2), range(2, 4))):
        evictions = log.cell(layers, chunks)
        on_device = torch.full((num_slots(evictions),), -1, dtype=flat_dtype(evictions))
        pack_(evictions, on_device)
        elsewhere = on_device.clone()
        on_device.fill_(-1)
        log.replace(layers, chunks, unpack(evictions, elsewhere))
    assert log.same_as(expected)


def test_unpacked_slots_are_views_of_the_flat_memory() -> None:
    evictions = record("h2o").cell(range(2), range(1, 4))
    flat = torch.empty(num_slots(evictions), dtype=torch.int16)
    pack_(evictions, flat)
    grouped = [e for e in unpack(evictions, flat) if isinstance(e, GroupedEviction)]
    assert grouped
    assert all(e.slots_BGm.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for e in grouped)


def test_an_unpacked_eviction_does_what_the_packed_one_did() -> None:
    eviction = record("h2o")[0][1]
    flat = torch.empty(num_slots([eviction]), dtype=torch.int32)
    pack_([eviction], flat)
    (again,) = unpack([eviction], flat)
    cache = torch.randn(2, 2, 6, 3)
    new = torch.randn(2, 2, 2, 3)
    caches = cache.clone(), cache.clone()
    for each, placed in zip((eviction, again), caches, strict=True):
        each.place_(placed, new)
    assert torch.equal(*caches)
    assert not torch.equal(caches[0], cache)


def test_what_the_host_knows_takes_no_memory() -> None:
    log = record("lastrec")
    assert num_slots(log.cell(range(2), range(4))) == 0


def test_a_cell_of_short_and_long_caches_has_the_wider_dtype() -> None:
    short = GroupedEviction(
        filled_before=4, chunk_length=1, cache_length=4, slots_BGm=torch.zeros(1, 1, 1, dtype=slot_dtype(4))
    )
    long = GroupedEviction(
        filled_before=2**16,
        chunk_length=1,
        cache_length=2**16,
        slots_BGm=torch.full((1, 1, 1), 2**16 - 1, dtype=slot_dtype(2**16)),
    )
    flat = torch.empty(2, dtype=flat_dtype([short, long]))
    pack_([short, long], flat)
    assert flat.tolist() == [0, 2**16 - 1]
    assert same_decision(unpack([short, long], flat)[1], long)


class TestSameDecisions:
    @pytest.mark.parametrize("name", ["lastrec", "h2o"])
    def test_the_same_run_twice(self, name: str) -> None:
        assert record(name).same_as(record(name))

    def test_other_weights(self) -> None:
        assert not record("h2o", seed=0).same_as(record("h2o", seed=1))

    def test_another_policy(self) -> None:
        assert not record("h2o").same_as(record("lastrec"))

    def test_another_cache(self) -> None:
        assert not record("lastrec").same_as(record("lastrec", cache_length=(6, 8)))

    def test_other_runs_of_slots(self) -> None:
        integers = {"filled_before": 4, "chunk_length": 1, "cache_length": 4}
        a, b = (SharedEviction(**integers, runs=((slot, slot + 1),)) for slot in (0, 1))
        assert same_decision(a, a)
        assert not same_decision(a, b)

    def test_a_chunk_less(self) -> None:
        longer = record("lastrec")
        longer.append(0, longer[0][-1])
        assert not record("lastrec").same_as(longer)
