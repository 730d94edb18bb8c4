"""Small configurations, and one measurement of one of them that many tests look at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.bench.configurations import CONFIGURATIONS, Configuration
from crosscurrent.cli import main
from crosscurrent.kvcache.names import CacheConfig, PolicyKind
from crosscurrent.model.config import MLPKind

_SMALL = CONFIGURATIONS["cpu-small"]

SMALL_ONES = {
    "as it is": _SMALL,
    # Columns of one chunk and of several, caches of different length, a last chunk of one token.
    "lastrec": replace(
        _SMALL,
        cache=CacheConfig(policy=PolicyKind.LASTREC, cache_length=(16, 20, 17)),
        grad=replace(_SMALL.grad, cachecp_qname="default", layers_per_cell=1, chunk_size=6),
        sequence_length=53,
        num_targets=53,
    ),
    "not gated": replace(
        _SMALL,
        model=replace(_SMALL.model, mlp_kind=MLPKind.GELU, head_size=16),
        grad=replace(_SMALL.grad, layercp_qname="torch-quantized8", layers_per_cell=3),
        batch_size=1,
        num_targets=5,
    ),
    "one column": replace(_SMALL, sequence_length=9, num_targets=1),
}


@pytest.fixture(params=SMALL_ONES)
def small(request: pytest.FixtureRequest) -> Configuration:
    """One small configuration after the other."""
    return SMALL_ONES[request.param]


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of ``crosscurrent bench cpu-small``, which is measured in simulation."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    assert main(["bench", "cpu-small", "--json", str(file)]) == 0
    return json.loads(Path(file).read_text(encoding="utf-8"))
