"""Documents as bytes, and the windows of them that one optimizer step sees.

The batch of a step depends on the seed and the number of the step only. So a resumed run needs no
state of the data at all: it asks for the next step.

Shape letters: B batch, T tokens of a window.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VOCABULARY = 256
"""Tokens are bytes."""

IGNORED = -100
"""The target of a position that has none (PyTorch's ``ignore_index``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one optimizer step learns from."""

    input_ids_BT: Tensor
    targets_BT: Tensor
    """The byte after each input, or ``IGNORED`` past the end of a short document."""

    @property
    def num_tokens(self) -> int:
        """How many tokens the model reads."""
        return self.input_ids_BT.numel()


class Corpus:
    """A set of documents to draw windows from. A window never crosses the end of its document."""

    def __init__(self, documents: Sequence[bytes]) -> None:
        """Take the documents.

        Raises:
            ValueError: there is no document of at least two bytes.
        """
        self._documents = [
            np.frombuffer(document, dtype=np.uint8) for document in documents if len(document) >= 2
        ]
        if not self._documents:
            raise ValueError(
                f"none of the {len(documents)} documents has the two bytes that a prediction needs; "
                "give a longer text"
            )

    @property
    def num_bytes(self) -> int:
        """The length of all documents together."""
        return sum(len(document) for document in self._documents)

    @property
    def num_documents(self) -> int:
        """How many documents windows are drawn from."""
        return len(self._documents)

    def fingerprint(self) -> str:
        """The same for the same documents in the same order, on every machine."""
        digest = hashlib.sha256()
        for document in self._documents:
            digest.update(len(document).to_bytes(8, "little"))
            digest.update(document.tobytes())
        return digest.hexdigest()

    def batch(self, *, seed: int, step: int, batch_size: int, length: int) -> Batch:
        """The windows of step ``step``: every start in every document is equally likely."""
        draw = np.random.default_rng([seed, step])
        starts_per_document = np.array([max(1, len(document) - length) for document in self._documents])
        stops = np.cumsum(starts_per_document)
        inputs = np.zeros((batch_size, length), dtype=np.int64)
        targets = np.full((batch_size, length), IGNORED, dtype=np.int64)
        for row, pick in enumerate(draw.integers(0, stops[-1], size=batch_size)):
            which = int(np.searchsorted(stops, pick, side="right"))
            start = int(pick - stops[which] + starts_per_document[which])
            window = self._documents[which][start : start + length + 1]
            inputs[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
        return Batch(input_ids_BT=torch.from_numpy(inputs), targets_BT=torch.from_numpy(targets))


def read_corpus(files: Sequence[Path]) -> Corpus:
    """The files as documents, or, with no file, the long text that every Python installation has.

    Raises:
        ValueError: a file is empty, or too short to learn from.
        OSError: a file cannot be read.
    """
    if not files:
        return Corpus(["\n\n".join(pydoc_data.topics.topics.values()).encode()])
    documents = [file.read_bytes() for file in files]
    for file, document in zip(files, documents, strict=True):
        if len(document) < 2:
            raise ValueError(
                f"{file} has {len(document)} bytes, expected the two that a prediction needs; leave it out"
            )
    return Corpus(documents)
