"""What a configuration has to compute and to move, counted from its sizes: integers only.

Operations are multiplications and additions, each for itself. With the columns and rows of `gradient.plan`,
and S = min(L, stop) the slots that the chunk which ends at position `stop` sees:

- A matrix product of [M, K] and [K, N]: 2 M K N. M is the batch times the tokens of a column, or those of a
  slice of the head. The backward pass of a linear map has two more of the same size: for its input and for
  its weight.
- Attention, for a query and a key that it sees, in one head of size D: 4 D forward (scores, values), 10 D
  backward (scores again, and the gradients of weights, values, queries, keys), 2 D for the summed weights
  of h2o. A chunk of C queries sees C S - C (C - 1) / 2 pairs: its last C keys causally, the others all.

The forward pass computes each layer on each column, and the head on the columns with targets. The backward
pass computes the head there again, with its gradients; each row once more for its KV checkpoints, without
the last column, and of the row's last layer only keys and values; and each cell again, with its gradients.
Norms, rotations, activations, the softmax, the loss and quantization are not counted: their time is that of
their bytes.

Bytes are those that go over the link between host and device: checkpoints as `gradient.traffic` moves them,
and the token ids and targets. Which copy goes when stands in `_forward_bytes` and `_backward_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from crosscurrent.bench.configurations import Configuration
from crosscurrent.gradient.checkpoints import CheckpointFormat
from crosscurrent.gradient.plan import Chunk, Column
from crosscurrent.kvcache.names import PolicyKind
from crosscurrent.model.config import MLPKind
from crosscurrent.model.loss import slices


class Role(Enum):
    """Which product of a linear map y = x W^T: they read memory in different directions."""

    OUTPUT = "output"
    """x W^T."""
    INPUT = "gradient of the input"
    """dy W."""
    WEIGHT = "gradient of the weight"
    """dy^T x."""


class Product(NamedTuple):
    """One matrix product of a linear map."""

    role: Role
    rows: int
    in_size: int
    out_size: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.in_size * self.out_size


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCount:
    """What one pass has to do."""

    products: Counter[Product]
    """How often each matrix product is computed."""
    attention: int
    """Operations of the attention, and of h2o's summed weights."""
    to_device: int
    """Bytes from host to device."""
    to_host: int
    """Bytes from device to host."""

    @property
    def operations(self) -> int:
        """All of them."""
        return self.attention + sum(product.operations * num for product, num in self.products.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What a step has to do."""

    forward: PassCount
    backward: PassCount

    @property
    def products(self) -> Counter[Product]:
        """The matrix products of both passes."""
        return self.forward.products + self.backward.products


def count(configuration: Configuration) -> Counts:
    """Count a configuration's step."""
    return _Counter(configuration).count()


class _Counter:
    """Walks the lattice as the passes do."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._model = configuration.model
        self._fmt: CheckpointFormat = configuration.checkpoint_format()
        self._plan = self._fmt.plan
        self._first_target = configuration.sequence_length - configuration.num_targets
        m = self._model
        width, kv_width = m.num_heads * m.head_dim, m.groups * m.head_dim
        mlp_inputs = 2 if m.mlp_kind is MLPKind.SWIGLU else 1
        self._keys_values = [(m.embed_size, kv_width)] * 2
        self._linears = [
            (m.embed_size, width),
            *self._keys_values,
            (width, m.embed_size),
            *[(m.embed_size, m.hidden_size)] * mlp_inputs,
            (m.hidden_size, m.embed_size),
        ]

    def count(self) -> Counts:
        """Both passes."""
        return Counts(
            forward=PassCount(
                products=self._forward_products(),
                attention=self._forward_attention(),
                to_device=self._batch_bytes(),
                to_host=self._forward_bytes(),
            ),
            backward=PassCount(
                products=self._backward_products(),
                attention=self._backward_attention(),
                **self._backward_bytes(),
            ),
        )

    def _forward_products(self) -> Counter[Product]:
        products: Counter[Product] = Counter()
        for column in self._plan.columns:
            for sizes in self._linears:
                products[self._output(column, sizes)] += self._model.num_layers
        for rows in self._head_rows():
            products[Product(Role.OUTPUT, rows, self._model.embed_size, self._model.vocab_size)] += 1
        return products

    def _backward_products(self) -> Counter[Product]:
        products: Counter[Product] = Counter()
        for rows in self._head_rows():
            for role in Role:
                products[Product(role, rows, self._model.embed_size, self._model.vocab_size)] += 1
        for row in self._plan.rows:
            for column in self._plan.columns[:-1]:
                for sizes in self._linears:
                    products[self._output(column, sizes)] += len(row.layers) - 1
                for sizes in self._keys_values:
                    products[self._output(column, sizes)] += 1
        for column in self._plan.columns:
            for sizes in self._linears:
                for role in Role:
                    product = self._output(column, sizes)._replace(role=role)
                    products[product] += self._model.num_layers
        return +products

    def _output(self, column: Column, sizes: tuple[int, int]) -> Product:
        return Product(Role.OUTPUT, self._configuration.batch_size * column.length, *sizes)

    def _head_rows(self) -> Iterator[int]:
        """Rows of the head's slices."""
        batch_size = self._configuration.batch_size
        for column in self._target_columns():
            length = column.stop - max(column.start, self._first_target)
            for start, stop in slices(length, batch_size=batch_size, vocab_size=self._model.vocab_size):
                yield batch_size * (stop - start)

    def _target_columns(self) -> list[Column]:
        return [column for column in self._plan.columns if column.stop > self._first_target]

    def _forward_attention(self) -> int:
        summed = 2 if self._configuration.cache.policy is PolicyKind.H2O else 0
        layers = range(self._model.num_layers)
        return (4 + summed) * sum(
            self._seen(layer, column) for layer in layers for column in self._plan.columns
        )

    def _backward_attention(self) -> int:
        operations = 0
        for row in self._plan.rows:
            # The replay attends to go on to the next layer, and a row's last layer does not go on.
            for layer in row.layers[:-1]:
                operations += 4 * sum(self._seen(layer, column) for column in self._plan.columns[:-1])
            for layer in row.layers:
                operations += (4 + 10) * sum(self._seen(layer, column) for column in self._plan.columns)
        return operations

    def _seen(self, layer: int, column: Column) -> int:
        """Pairs of a query and a key that it sees, in all heads, times the head size."""
        length = self._configuration.cache.length(layer)
        pairs = sum(_pairs(chunk, length) for chunk in column.chunks)
        return self._configuration.batch_size * self._model.num_heads * self._model.head_dim * pairs

    def _batch_bytes(self) -> int:
        """Ids, and targets padded to the same length."""
        c = self._configuration
        return 2 * c.batch_size * c.sequence_length * torch.int64.itemsize

    def _forward_bytes(self) -> int:
        """A record for each cell, and the head's inputs."""
        return self._records() + self._tops()

    def _backward_bytes(self) -> dict[str, int]:
        """The head's inputs come in, and its gradients go out. Then each row has its records for the replay
        but for that of the last column, and all of them again for its cells; the gradients at its top and,
        but for the lowest row, those at its bottom; and the KV checkpoints out and in."""
        plan, fmt = self._plan, self._fmt
        gradients = {column.index: fmt.head_gradient(column).num_bytes for column in plan.columns}
        at_the_head = sum(gradients[column.index] for column in self._target_columns())
        between_rows = (len(plan.rows) - 1) * sum(gradients.values())
        caches = sum(fmt.kv(row, column).num_bytes for row in plan.rows for column in fmt.kv_columns())
        replays = sum(fmt.record(row, column).num_bytes for row in plan.rows for column in plan.columns[:-1])
        moved_back = at_the_head + between_rows + caches
        return {
            "to_device": self._tops() + replays + self._records() + moved_back,
            "to_host": moved_back,
        }

    def _records(self) -> int:
        return sum(
            self._fmt.record(row, column).num_bytes
            for row in self._plan.rows
            for column in self._plan.columns
        )

    def _tops(self) -> int:
        return sum(self._fmt.top(column).num_bytes for column in self._target_columns())


def _pairs(chunk: Chunk, cache_length: int) -> int:
    slots = min(cache_length, chunk.stop)
    return chunk.length * slots - chunk.length * (chunk.length - 1) // 2
