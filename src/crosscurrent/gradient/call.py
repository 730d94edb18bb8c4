"""One call of the model: its batch, its plan and what trains. Shared by the two passes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.checkpoints import CheckpointFormat
from crosscurrent.gradient.graphs import Graphs
from crosscurrent.gradient.plan import Column, Plan, Row
from crosscurrent.gradient.windows import Windows, make_windows
from crosscurrent.kvcache.buffers import KVBuffer, PlainKVBuffer, Shape, make_buffer
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.kvcache.placement import Eviction, GroupedEviction, SharedEviction
from crosscurrent.kvcache.quantize import make_quantizer, packed_bytes
from crosscurrent.kvcache.replay_log import ReplayLog
from crosscurrent.model.loss import slices
from crosscurrent.model.transformer import Block, Head, Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What stays the same from call to call."""

    gpt_model: Transformer
    head_model: Head
    cache: CacheConfig
    args: GradientArgs

    @property
    def num_layers(self) -> int:
        """Layers of the transformer."""
        return len(self.gpt_model.layers)

    def block(self, layer: int) -> Block:
        """A layer by its index."""
        block = self.gpt_model.layers[layer]
        assert isinstance(block, Block)
        return block


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One batch on the device, and how it is cut."""

    setup: Setup
    fmt: CheckpointFormat
    ids_BT: Tensor
    targets_BT: Tensor
    """As long as the inputs; -100 where there is no target."""
    first_target: int
    """The first position that may have a target, known on the host."""
    count: Tensor
    """The number of targets as a floating point scalar. NaN if some id was out of range, which makes the
    loss and all gradients NaN."""
    first_row: int
    """The lowest row below or in which something trains; the rows under it have no backward pass."""
    embedding_trains: bool
    trains: tuple[bool, ...]
    """Which parameters train, in the model's order: as it was when the call was made."""
    graphs: Graphs = field(compare=False)
    log: ReplayLog = field(compare=False)

    @property
    def plan(self) -> Plan:
        """The lattice."""
        return self.fmt.plan

    @property
    def device(self) -> torch.device:
        """Where all the work is done."""
        return self.ids_BT.device

    def has_targets(self, column: Column) -> bool:
        """Whether some position of a column may have a target."""
        return column.stop > self.first_target

    def head_slices(self, column: Column) -> list[slice]:
        """Token ranges of the sequence whose logits may exist at once."""
        start = max(column.start, self.first_target)
        bounds = slices(
            column.stop - start,
            batch_size=self.ids_BT.shape[0],
            vocab_size=self.setup.gpt_model.config.vocab_size,
        )
        return [slice(start + a, start + b) for a, b in bounds]

    def device_sizes(self) -> list[tuple[str, int]]:
        """The larger things that are allocated on the device, in bytes, for an error message."""
        shapes, plan = self.fmt.shapes, self.plan
        entry = 2 * shapes.batch_size * shapes.num_groups * shapes.head_size
        width = torch.promote_types(shapes.dtype, torch.float32).itemsize
        row_slots = max(sum(shapes.cache_lengths[layer] for layer in row.layers) for row in plan.rows)
        sizes = self.fmt.sizes()
        hidden = shapes.batch_size * plan.longest_column * shapes.embed_size * shapes.dtype.itemsize
        all_slots = (2 * shapes.batch_size, shapes.num_groups, sum(shapes.cache_lengths), shapes.head_size)
        quantizer = make_quantizer(self.setup.cache.buffer)
        return [
            ("KV caches of the forward pass", packed_bytes(quantizer, all_slots, shapes.dtype)),
            ("KV caches of a row", entry * row_slots * shapes.dtype.itemsize),
            ("their gradients", entry * row_slots * width),
            ("the largest checkpoint, four to ten of which are on the device,", max(sizes.values())),
            ("the hidden states of a column", hidden),
        ]

    def position(self, column: Column) -> Tensor:
        """Where a column starts, for its rotations."""
        make = partial(self.setup.gpt_model.position, column.start)
        return self.graphs.recall(("position", column.start), make)

    def shared_slots(self, evictions: Iterable[Eviction]) -> Tensor:
        """The slots of evictions that were decided on the host, one after the other, on the device."""
        runs = tuple(run for each in evictions if isinstance(each, SharedEviction) for run in each.runs)
        return self.graphs.recall(("slots", runs), partial(self._slots_of, runs))

    def _slots_of(self, runs: Sequence[tuple[int, int]]) -> Tensor:
        slots_L = torch.arange(max(self.fmt.shapes.cache_lengths), dtype=torch.int32, device=self.device)
        return torch.cat([slots_L[:0], *(slots_L[start:stop] for start, stop in runs)])

    def evictions(self, row: Row, column: Column, slots: Tensor) -> list[list[Eviction]]:
        """The evictions of a cell's layers, with their slots in one flat tensor."""
        shapes = self.fmt.shapes
        shape_BG = (shapes.batch_size, shapes.num_groups) if self.fmt.logs_slots else (1, 1)
        found = []
        for length in (shapes.cache_lengths[layer] for layer in row.layers):
            lengths, filled = [chunk.length for chunk in column.chunks], min(column.start, length)
            placed, slots = GroupedEviction.of_chunks(
                slots, shape_BG, lengths, filled=filled, cache_length=length
            )
            found.append(placed)
        return found

    def windows(self, row: Row, column: Column, slots: Tensor, *, backward: bool = False) -> list[Windows]:
        """What the chunks of a column see in each layer of a row, whose evictions have these slots."""
        shapes = self.fmt.shapes
        slot_bytes = 2 * shapes.batch_size * shapes.num_groups * shapes.head_size * shapes.dtype.itemsize
        return [
            make_windows(placed, slot_bytes=slot_bytes, device=self.device, backward=backward)
            for placed in self.evictions(row, column, slots)
        ]

    def work_key(self, what: str, row: Row, column: Column) -> Hashable:
        """What work on a cell depends on, its tensors aside: columns far from the left edge are all alike."""
        filled = (min(column.start, self.fmt.shapes.cache_lengths[layer]) for layer in row.layers)
        return what, row.index, tuple(chunk.length for chunk in column.chunks), tuple(filled)

    def forward_cache(self, layer: int) -> KVBuffer:
        """A cache of one layer for the forward pass, which has those of all layers at once."""
        shape, dtype = self._cache_shape(layer), self.fmt.shapes.dtype
        return self.graphs.keep(
            ("forward cache", layer),
            lambda: make_buffer(self.setup.cache.buffer, shape, dtype=dtype, device=self.device),
        )

    def gradient_cache(self, row: Row, layer: int) -> PlainKVBuffer:
        """A cache of one layer, with its gradient, for the cells of a row. Rows have theirs in turns."""
        shape = self._cache_shape(layer)
        return self.graphs.keep(
            ("gradient cache", row.layers.index(layer), shape),
            lambda: PlainKVBuffer.empty(
                shape,
                dtype=self.fmt.shapes.dtype,
                device=self.device,
                quantizer=make_quantizer(self.setup.cache.buffer),
                with_gradient=True,
            ),
        )

    def _cache_shape(self, layer: int) -> Shape:
        shapes = self.fmt.shapes
        return shapes.batch_size, shapes.num_groups, shapes.cache_lengths[layer], shapes.head_size


def trainable(setup: Setup) -> list[nn.Parameter]:
    """The parameters that train, each once, tied or not."""
    modules = nn.ModuleList([setup.gpt_model, setup.head_model])
    return [parameter for parameter in modules.parameters() if parameter.requires_grad]
