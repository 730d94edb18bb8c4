"""What the tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

import crosscurrent


@pytest.fixture
def _cuda() -> Iterator[None]:
    """CUDA, simulated where there is no device."""
    with nullcontext() if torch.cuda.is_available() else crosscurrent.simulate():
        yield
