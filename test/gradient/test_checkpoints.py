"""Layouts hold what goes into them, and no more bytes than they say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.checkpoints import CheckpointFormat, Kind, Layout, Shapes
from crosscurrent.gradient.plan import make_plan
from crosscurrent.kvcache.buffers import PlainKVBuffer
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.kvcache.policies import make_policy
from crosscurrent.kvcache.replay_log import num_slots

CPU = torch.device("cpu")
LENGTHS = (6, 9, 7)


def make_format(
    sequence_length: int = 29, *, policy: str = "lastrec", name: str = "default"
) -> CheckpointFormat:
    plan = make_plan(
        sequence_length,
        cache_lengths=LENGTHS,
        chunk_size=3,
        layers_per_cell=2,
        chunks_per_cell_multiplier=1.0,
    )
    shapes = Shapes(
        batch_size=2, embed_size=10, num_groups=3, head_size=4, cache_lengths=LENGTHS, dtype=torch.float32
    )
    args = GradientArgs(layercp_qname=name, cachecp_qname=name)
    return CheckpointFormat(plan, shapes, CacheConfig.from_name(policy, cache_length=LENGTHS), args)


@given(
    parts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
            st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64]),
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_the_parts_of_a_layout_do_not_overlap(parts: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    layout = Layout(tuple(parts))
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    assert [(tuple(view.shape), view.dtype) for view in views] == parts
    for number, view in enumerate(views):
        view.fill_(number + 1)
    for number, view in enumerate(views):
        assert (view == number + 1).all()
        assert view.numel() == 0 or view.data_ptr() % view.element_size() == 0


@pytest.mark.parametrize("name", ["default", "torch-quantized8", "torch-quantized4"])
def test_a_layer_input_comes_back_within_the_quantizers_bound(name: str) -> None:
    fmt = make_format(name=name)
    column, row = fmt.plan.columns[1], fmt.plan.rows[0]
    x = torch.randn(2, column.length, 10)
    layout, scratch = fmt.record(row, column), fmt.make_scratch(CPU)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    fmt.pack_input(x, layout, buffer, scratch)
    error = (fmt.unpack_input(layout, buffer, scratch) - x).abs().max()
    # Half a step of the widest row, or nothing at all.
    widest = (x.amax(-1) - x.amin(-1)).max()
    levels = {"default": torch.inf, "torch-quantized8": 254, "torch-quantized4": 14}[name]
    assert error <= widest / levels / 2 + (0 if name == "default" else 1e-5)
    assert (error == 0) == (name == "default")


@pytest.mark.parametrize("column_index", [1, 2])
def test_a_kv_checkpoint_restores_what_is_filled_and_leaves_the_rest(column_index: int) -> None:
    fmt = make_format()
    column, row = fmt.plan.columns[column_index], fmt.plan.rows[0]
    caches = [
        PlainKVBuffer.empty((2, 3, LENGTHS[layer], 4), dtype=torch.float32, device=CPU)
        for layer in row.layers
    ]
    for cache in caches:
        cache.entries_NGLD.normal_()
    before = [cache.entries_NGLD.clone() for cache in caches]
    buffer = torch.zeros(fmt.kv(row, column).num_bytes, dtype=torch.uint8)
    fmt.pack_caches(caches, row, column, buffer, None)
    for cache in caches:
        cache.entries_NGLD.fill_(torch.nan)
    fmt.unpack_caches(caches, row, column, buffer, None)
    for layer, cache, old in zip(row.layers, caches, before, strict=True):
        filled = min(LENGTHS[layer], column.start)
        assert torch.equal(cache.entries_NGLD[:, :, :filled], old[:, :, :filled])
        assert cache.entries_NGLD[:, :, filled:].isnan().all()


@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
@pytest.mark.parametrize("sequence_length", [4, 6, 7, 29, 40])
def test_a_record_has_room_for_exactly_the_slots_that_are_evicted(policy: str, sequence_length: int) -> None:
    fmt = make_format(sequence_length, policy=policy)
    config = CacheConfig.from_name(policy, cache_length=LENGTHS)
    policies = [make_policy(config, layer) for layer in range(len(LENGTHS))]
    for each in policies:
        each.reset(2, 3, CPU)
    for column in fmt.plan.columns:
        evicted = {
            layer: [each.place(chunk.length) for chunk in column.chunks]
            for layer, each in enumerate(policies)
        }
        for row in fmt.plan.rows:
            slots = num_slots(eviction for layer in row.layers for eviction in evicted[layer])
            (room,), _ = fmt.record(row, column).parts[-1]
            assert room == slots


def test_there_is_a_kv_checkpoint_for_all_left_edges_but_the_first_and_the_last() -> None:
    fmt = make_format()
    assert len(fmt.plan.columns) == 5
    keys = [key for key in fmt.sizes() if key.kind is Kind.KV]
    assert [key.column for key in keys] == [1, 2, 3]


@pytest.mark.parametrize("sequence_length", [4, 6, 9])
def test_short_sequences_need_none(sequence_length: int) -> None:
    assert not [key for key in make_format(sequence_length).sizes() if key.kind is Kind.KV]
