"""Takes optimizer steps, one after the other, and can be stopped after any of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.train import checkpoint as checkpoints
from crosscurrent.train.checkpoint import Checkpoint
from crosscurrent.train.corpus import Corpus
from crosscurrent.train.settings import OptimizerArgs, RunArgs


class NotFiniteError(ArithmeticError):
    """The loss or the gradient is NaN or infinite. The parameters are those of the step before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one optimizer step was like."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean cross entropy per byte, in nats, before the step."""
    grad_norm: float
    """The length of the gradient, before it was clipped."""
    tokens_per_second: float
    pinned_bytes: int
    """Pinned memory that is reserved by now, for checkpoints and for batches on their way."""


class Trainer:
    """A model, its optimizer and its text."""

    def __init__(
        self,
        model: LongContextGradientModel,
        *,
        corpus: Corpus,
        run: RunArgs,
        optimizer: OptimizerArgs,
        device: torch.device,
    ) -> None:
        """Start before the first step."""
        self.step = 0
        self._model = model
        self._corpus = corpus
        self._run = run
        self._optimizer_args = optimizer
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = optimizer.build(self._parameters)
        self._device = device

    def take_step(self) -> StepReport:
        """Learn from the next batch.

        Raises:
            NotFiniteError: there is no step to take; nothing was changed.
            FloatingPointError: the same, and the guard that was asked for names where it was found.
        """
        start = time.perf_counter()
        batch = self._corpus.batch(
            seed=self._run.seed,
            step=self.step,
            batch_size=self._run.batch_size,
            length=self._run.sequence_length,
        )
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._model(batch.input_ids_BT, batch.targets_BT)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._parameters, self._optimizer_args.max_grad_norm)
        loss_value, norm_value = torch.stack([loss.detach().double(), norm.double()]).tolist()
        self._require_finite(loss_value, norm_value)
        for group in self._optimizer.param_groups:
            group["lr"] = self._optimizer_args.rate(self.step)
        self._optimizer.step()
        self.step += 1
        return StepReport(
            step=self.step,
            loss=loss_value,
            grad_norm=norm_value,
            tokens_per_second=batch.num_tokens / (time.perf_counter() - start),
            pinned_bytes=self._model.pinned_bytes(),
        )

    def save(self, path: Path, run: Mapping[str, str]) -> None:
        """Write everything that the next step depends on; ``run`` says what run this is."""
        tensors = checkpoints.collect({"model": self._model}, self._optimizer, self._device)
        checkpoints.save(path, Checkpoint(step=self.step, run=run, tensors=tensors))

    def resume(self, path: Path, run: Mapping[str, str]) -> None:
        """Go on where a saved run stopped.

        Raises:
            CheckpointError: the file is no checkpoint, or one of a run that is not ``run``.
        """
        found = checkpoints.load(path)
        checkpoints.require_same_run(path, found.run, run)
        checkpoints.restore(found.tensors, {"model": self._model}, self._optimizer, self._device)
        self.step = found.step

    def _require_finite(self, loss: float, norm: float) -> None:
        for name, value in (("loss", loss), ("length of the gradient", norm)):
            if not abs(value) < float("inf"):
                raise NotFiniteError(
                    f"the {name} of step {self.step + 1} is {value}; a lower --optimizer.learning_rate or "
                    "--optimizer.max_grad_norm usually helps"
                )
