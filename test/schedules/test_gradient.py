"""The gradient, whose checkpoints travel on streams of their own, under other schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import crosscurrent
from crosscurrent.gradient import GradientArgs, LongContextGradientModel
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.model.config import ModelConfig
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.races.findings import Finding
from crosscurrent.schedules import (
    PCT,
    LatestAndEarliest,
    Program,
    RandomWalk,
    Replayer,
    explore,
    keep_values,
    prove,
)

pytestmark = pytest.mark.simulation

VOCABULARY = 13


def record(
    cache: str, monkeypatch: pytest.MonkeyPatch, *, drop: Callable[[int], bool] = lambda number: False
) -> tuple[Program, list[Finding]]:
    """One step of a small model, without the waits of streams for events that ``drop`` names by number."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCABULARY, num_layers=2, embed_size=8, num_heads=4, num_groups=2, mlp_size=12
    )
    with crosscurrent.simulate(), monkeypatch.context() as patch:
        gpt = Transformer(config)
        model = LongContextGradientModel(
            gpt,
            Head(config),
            cache=CacheConfig.from_name(cache, cache_length=8, grace_period=0),
            grad=GradientArgs(
                chunk_size=2, async_cpu_transfer=True, layercp_pin_memory=True, cachecp_pin_memory=True
            ),
        ).to("cuda")
        ids = torch.randint(VOCABULARY, (2, 20)).cuda()
        count = 0
        wait = torch.cuda.Stream.wait_event

        def some_wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> Any:
            nonlocal count
            count += 1
            return None if drop(count) else wait(stream, event)

        patch.setattr(torch.cuda.Stream, "wait_event", some_wait)
        with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
            loss = model(ids, ids)
            loss.backward()
            keeper.name({"loss": loss, **_grads(model)})
        assert count > 20, "the gradient is expected to hand over by events"
        return keeper.program(), seen.findings


def _grads(model: torch.nn.Module) -> dict[str, Tensor]:
    return {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cache", ["lastrec", "h2o-torch-quantized8"])
def test_the_gradient_is_the_same_in_every_schedule(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, findings = record(cache, monkeypatch)
    assert not findings
    replayer = Replayer(program)
    assert "loss" in program.names
    assert len(program.names) > 10
    assert replayer.unfaithful() == ()
    assert explore(program, [LatestAndEarliest(), RandomWalk(count=10), PCT(count=10)]).same


def test_waits_that_are_left_out_give_wrong_gradients_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait at a time. Some may be needless, and some races come to the same with these values."""
    named = 0
    for number in range(1, 21, 3):
        program, findings = record("lastrec", monkeypatch, drop=lambda count, number=number: count == number)
        witnesses = [str(finding.witness) for finding in prove(program, findings) if finding.schedule]
        named += any(".grad: " in witness or "loss: " in witness for witness in witnesses)
    assert named >= 3
