"""Names on the command line, types inside."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from crosscurrent.kvcache.names import BufferKind, CacheConfig, PolicyKind, parse_name


@pytest.mark.parametrize(("policy", "buffer"), list(itertools.product(PolicyKind, BufferKind)))
def test_every_combination_has_a_name(policy: PolicyKind, buffer: BufferKind) -> None:
    assert parse_name(f"{policy.value}-{buffer.value}") == (policy, buffer)
    config = CacheConfig(policy=policy, buffer=buffer)
    assert CacheConfig.from_name(config.name) == config


@pytest.mark.parametrize("policy", list(PolicyKind))
def test_a_policy_alone_has_the_default_buffer(policy: PolicyKind) -> None:
    assert parse_name(policy.value) == (policy, BufferKind.DEFAULT)


@pytest.mark.parametrize("name", ["", "h20-default", "torch-quantized8", "H2O-default", "-default"])
def test_an_unknown_policy_lists_the_known(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown cache policy '.*'; known are dense, lastrec, h2o"):
        parse_name(name)


@pytest.mark.parametrize("name", ["h2o-", "h2o-quantized8", "lastrec-torch-quantized2", "h2o-default-"])
def test_an_unknown_buffer_lists_the_known(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"unknown buffer kind '.*'; known are default, torch-quantized8, torch-quantized4"
    ):
        parse_name(name)


def test_lengths_may_differ_by_layer() -> None:
    config = CacheConfig(cache_length=(3, 5))
    assert [config.length(layer) for layer in (0, 1)] == [3, 5]
    assert CacheConfig(cache_length=7).length(9) == 7


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("lastrec", {"cache_length": 0}, "cache_length, in every layer, must be at least 1, got 0"),
        ("lastrec", {"cache_length": (4, 0)}, "cache_length, in every layer, must be at least 1, got 0"),
        ("lastrec", {"cache_length": ()}, r"one for each layer, got \(\)"),
        ("lastrec", {"init_grace_tokens": -1}, "init_grace_tokens must be at least 0, got -1"),
        ("h2o", {"grace_period": -1}, "grace_period must be at least 0, got -1"),
        ("lastrec", {"grace_period": 2}, "belong to h2o, but the policy is lastrec"),
        ("dense", {"normalize_scores": True}, "belong to h2o, but the policy is dense"),
        ("dense", {"init_grace_tokens": 1}, "dense evicts nothing"),
        ("lastrec", {"cache_length": 4, "init_grace_tokens": 4}, "leave no room.*less than.*4"),
        ("h2o", {"cache_length": (8, 4), "init_grace_tokens": 2, "grace_period": 2}, "leave no room"),
    ],
)
def test_what_cannot_be_a_cache(name: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig.from_name(name, **fields)


def test_grace_that_leaves_one_slot_is_fine() -> None:
    config = CacheConfig.from_name("h2o", cache_length=4, init_grace_tokens=2, grace_period=1)
    assert config.num_grace == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_length": [8, 8]}, r"cache_length.* must be a whole number of at least 1, got \[8, 8\]"),
        ({"cache_length": 8.5}, r"cache_length.* must be a whole number of at least 1, got 8\.5"),
        ({"policy": "h2o"}, "policy must be a PolicyKind, got 'h2o'; CacheConfig.from_name takes names"),
        ({"policy": PolicyKind.H2O, "normalize_scores": "no"}, "normalize_scores must be True or False"),
        ({"buffer": "torch-quantized8"}, "buffer must be a BufferKind, got 'torch-quantized8'"),
    ],
)
def test_what_is_of_another_type(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CacheConfig(**fields)
