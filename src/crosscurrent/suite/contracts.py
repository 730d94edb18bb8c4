"""The contracts layer: what the flags promise, and what they refuse."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.suite.experiment import (
    BATCH_SIZE,
    LENGTHS,
    cache_config,
    gradient_args,
    make_batches,
    make_model,
    make_parts,
    measure,
)
from crosscurrent.suite.layer import Outcome
from crosscurrent.suite.scenario import Scenario

FLAG = "async_cpu_transfer"
STAGED_IDS = 2 * 8 * BATCH_SIZE * max(LENGTHS)
"""Bytes of pinned memory beside checkpoints: ids and targets, 8 bytes each, on their way to the device."""


@dataclass(frozen=True)
class Contracts:
    """Asynchronous transfers are refused where they could not be asynchronous. Where they are not,
    checkpoints are in pinned memory: as much as the budget says, allocated once."""

    name: str = "contracts"
    claim: str = (
        f"{FLAG} is refused without pinned memory or off the GPU; checkpoints are pinned, as budgeted, "
        "and allocated once"
    )
    needs_cuda: bool = True
    needs_quiet: bool = False

    def takes(self, scenario: Scenario) -> bool:
        """Without graphs: nothing that is asked here is another with them."""
        return not scenario.graphs

    def check(self, scenario: Scenario) -> Outcome:
        """Ask for what has to be refused, then look at what is pinned."""
        accepted = [case for case, works in self._refusals(scenario) if works]
        if accepted:
            return Outcome.failed(f"{FLAG} was not refused {'; nor '.join(accepted)}")
        return self._pinned(scenario)

    def _refusals(self, scenario: Scenario) -> list[tuple[str, bool]]:
        cases = [
            ("with nothing pinned", _works(partial(_flag_on, layer_inputs=False, kv_checkpoints=False))),
            ("with layer inputs pinned", _works(partial(_flag_on, layer_inputs=True, kv_checkpoints=False))),
            (
                "with KV checkpoints pinned",
                _works(partial(_flag_on, layer_inputs=False, kv_checkpoints=True)),
            ),
        ]
        model = LongContextGradientModel(
            *make_parts(dtype=torch.float32, device="cpu"),
            cache=cache_config(scenario),
            grad=gradient_args(pinned=True, flag=True),
        )
        cases.append(("for a model in CPU memory", _works(partial(model, *make_batches()[0]))))
        return cases

    def _pinned(self, scenario: Scenario) -> Outcome:
        gc.collect()  # what is garbage now would give its addresses to others later
        before = set(_pinned_blocks())
        model = make_model(scenario)
        budget = model.pinned_budget(batch_size=BATCH_SIZE, sequence_length=max(LENGTHS))
        longest_first = make_batches()
        measure(model, longest_first[:1])
        first = {block: size for block, size in _pinned_blocks().items() if block not in before}
        measure(model, longest_first)
        again = {block: size for block, size in _pinned_blocks().items() if block not in before}
        if not 0 <= sum(first.values()) - budget.total <= STAGED_IDS:
            return Outcome.failed(f"{sum(first.values())} bytes are pinned, the budget says {budget.total}")
        # Ids may be: targets take another buffer where the host is ahead of the copy of the inputs.
        if not first.items() <= again.items() or sum(again.values()) - budget.total > STAGED_IDS:
            return Outcome.failed(
                "pinned memory was allocated again for batches that had room in what there was"
            )
        return Outcome.held(f"4 refusals; {budget.total} bytes pinned in {len(first)} blocks, used 3 times")


def _flag_on(*, layer_inputs: bool, kv_checkpoints: bool) -> GradientArgs:
    return GradientArgs(
        async_cpu_transfer=True, layercp_pin_memory=layer_inputs, cachecp_pin_memory=kv_checkpoints
    )


def _works(attempt: Callable[[], object]) -> bool:
    """Whether an attempt succeeds, rather than raise a ValueError that names the flag."""
    try:
        attempt()
    except ValueError as error:
        return FLAG not in str(error)
    return True


def _pinned_blocks() -> dict[int, int]:
    """Addresses and sizes of all pinned memory that some tensor of this process refers to."""
    blocks = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and found.device.type == "cpu" and found.is_pinned():
            storage = found.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
    return blocks
