"""``crosscurrent train``: the long-context gradient on real text."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.progress import TextColumn

from crosscurrent.cli.arguments import command_parser
from crosscurrent.cli.console import progress, say, say_above
from crosscurrent.cli.exits import CommandError, ExitCode, WrongUseError, as_wrong_use
from crosscurrent.cli.files import require_room
from crosscurrent.cli.interrupt import StopRequests
from crosscurrent.gradient.args import GradientArgs
from crosscurrent.kvcache.names import CacheConfig, parse_name
from crosscurrent.model.config import LoRAConfig, MLPKind, ModelConfig
from crosscurrent.train.build import TrainConfig, build_model, build_trainer
from crosscurrent.train.checkpoint import require_there
from crosscurrent.train.corpus import VOCABULARY, Corpus, read_corpus
from crosscurrent.train.settings import OptimizerArgs, RunArgs, reproducible
from crosscurrent.train.trainer import NotFiniteError, StepReport, Trainer

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArgs:
    """The model."""

    size: Literal["tiny", "small", "medium", "large", "xlarge"] = "tiny"
    """A named size; what else is given takes the place of its values."""
    num_layers: int | None = None
    """Transformer layers."""
    embed_size: int | None = None
    """Width of the residual stream."""
    num_heads: int | None = None
    """Query heads."""
    num_groups: int | None = None
    """Query groups, each with one key and value head."""
    mlp_kind: MLPKind | None = None
    """The MLP."""
    tie_embeddings: bool = False
    """Use the embedding as the output matrix, too."""

    def build(self, lora: LoRAConfig | None) -> ModelConfig:
        """The model's own configuration."""
        given = {
            name: getattr(self, name)
            for name in ("num_layers", "embed_size", "num_heads", "num_groups", "mlp_kind")
            if getattr(self, name) is not None
        }
        return ModelConfig.named(
            self.size, vocab_size=VOCABULARY, tie_embeddings=self.tie_embeddings, lora=lora, **given
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAArgs:
    """Low-rank updates of the attention's projections. With them, all else is frozen."""

    rank: int = 0
    """Rank of the updates; 0 trains the whole model instead."""
    alpha: float = 16.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the input of the update."""

    def build(self) -> LoRAConfig | None:
        """The configuration, or None for no LoRA."""
        if self.rank == 0:
            return None
        return LoRAConfig(rank=self.rank, alpha=self.alpha, dropout=self.dropout)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheArgs:
    """The KV caches."""

    name: str = "h2o-default"
    """Policy and buffer, such as lastrec-default or h2o-torch-quantized8."""
    cache_length: int = 256
    """Slots of a cache, in every layer."""
    init_grace_tokens: int = 0
    """The first tokens of a sequence, which are never forgotten."""
    grace_period: int = 0
    """The newest tokens, which h2o does not forget."""
    normalize_scores: bool = False
    """Divide h2o's scores by how often a token could have been attended to."""

    def build(self) -> CacheConfig:
        """The cache's own configuration."""
        policy, buffer = parse_name(self.name)
        return CacheConfig(
            policy=policy,
            buffer=buffer,
            cache_length=self.cache_length,
            init_grace_tokens=self.init_grace_tokens,
            grace_period=self.grace_period,
            normalize_scores=self.normalize_scores,
        )


def parser() -> ArgumentParser:
    """The options of the command."""
    options = command_parser(
        "train",
        "Train a long-context transformer with bounded KV caches on text, bytes as tokens. Exit code: 0 the "
        "run finished, 1 it failed, 2 wrong use, 130 or 143 interrupted after saving.",
        "crosscurrent train --text book.txt --steps 500 --checkpoint.file book.safetensors",
    )
    options.add_argument("--config", action="config", help="A YAML file with any of these options.")
    options.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        default=[],
        help="Documents. If not given, the help topics that every Python installation carries.",
    )
    options.add_argument("--steps", type=int, default=200, help="Optimizer steps of the whole run.")
    options.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="Where to compute."
    )
    options.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="Show the run and its pinned memory, and stop."
    )
    options.add_argument("--checkpoint.file", metavar="FILE", help="Save the state of the run there.")
    options.add_argument(
        "--checkpoint.every", type=int, default=50, metavar="N", help="Steps between two saves."
    )
    options.add_argument(
        "--resume", action="store_true", help="Go on where the checkpoint stopped, to the same bits."
    )
    options.add_class_arguments(RunArgs)
    options.add_class_arguments(ModelArgs, "model")
    options.add_class_arguments(KVCacheArgs, "kv_cache")
    options.add_class_arguments(
        GradientArgs,
        "grad",
        # The chunk follows the default cache length. Pinning means nothing on a CPU.
        default={"chunk_size": 64, "layercp_pin_memory": True, "cachecp_pin_memory": True},
    )
    options.add_class_arguments(LoRAArgs, "lora")
    options.add_class_arguments(OptimizerArgs, "optimizer")
    return options


def run(arguments: Namespace) -> int:
    """Train, or with ``--dry_run`` say what training would take."""
    with as_wrong_use():
        arguments = parser().instantiate(arguments)
        config = _config(arguments)
        corpus = read_corpus([Path(name) for name in arguments.text])
        _check(arguments)
        if arguments.dry_run:
            return _dry_run(config)
    with reproducible(config.run, config.device):
        return _run(config, corpus, arguments)


def _run(config: TrainConfig, corpus: Corpus, arguments: Namespace) -> int:
    identity = config.identity(corpus)
    checkpoint = Path(arguments.checkpoint.file) if arguments.checkpoint.file else None
    with as_wrong_use():
        trainer = build_trainer(config, corpus)
        if arguments.resume and checkpoint is not None:
            trainer.resume(checkpoint, identity)
    if trainer.step >= arguments.steps:
        say(f"nothing to do: {trainer.step} of {arguments.steps} steps are taken; give more --steps")
        return ExitCode.GOOD
    say(
        f"{corpus.num_bytes:,} bytes in {corpus.num_documents} document(s); steps {trainer.step + 1} to "
        f"{arguments.steps} of {config.run.batch_size} x {config.run.sequence_length} tokens; "
        f"cache {config.cache.name} of {config.cache.cache_length}; on {config.device.type}"
    )
    return _train(
        trainer, Saving(checkpoint, arguments.checkpoint.every, identity), arguments.steps, config.device
    )


@dataclass(frozen=True, slots=True)
class Saving:
    """Where the state of the run goes, and how often."""

    file: Path | None
    every: int
    identity: dict[str, str]

    def save(self, trainer: Trainer) -> None:
        """Save now, if there is a file to save to."""
        if self.file is not None:
            trainer.save(self.file, self.identity)


def _config(arguments: Namespace) -> TrainConfig:
    cuda = torch.cuda.is_available()
    if arguments.device == "cuda" and not cuda:
        raise ValueError("--device cuda, but this machine has no CUDA device; use --device cpu or auto")
    on_cuda = cuda and arguments.device != "cpu"
    return TrainConfig(
        model=arguments.model.build(arguments.lora.build()),
        cache=arguments.kv_cache.build(),
        grad=arguments.grad,
        optimizer=arguments.optimizer,
        run=RunArgs(
            seed=arguments.seed,
            batch_size=arguments.batch_size,
            sequence_length=arguments.sequence_length,
            dtype=arguments.dtype,
            num_threads=arguments.num_threads,
            deterministic=arguments.deterministic,
        ),
        device=torch.device("cuda" if on_cuda else "cpu"),
    )


def _check(arguments: Namespace) -> None:
    if arguments.steps < 1:
        raise WrongUseError(f"--steps must be at least 1, got {arguments.steps}")
    if arguments.checkpoint.every < 1:
        raise WrongUseError(f"--checkpoint.every must be at least 1, got {arguments.checkpoint.every}")
    if arguments.checkpoint.file is None:
        if arguments.resume:
            raise WrongUseError("--resume needs the checkpoint to go on from; name it with --checkpoint.file")
        return
    file = Path(arguments.checkpoint.file)
    if not arguments.checkpoint.file or file.is_dir():
        raise WrongUseError(f"--checkpoint.file names a file, got {arguments.checkpoint.file!r}")
    if arguments.resume:
        require_there(file)
    elif file.exists():
        raise WrongUseError(f"{file} exists; go on from it with --resume, or name another file")
    # Now, and not at the first save. Folders that are not there yet will be made.
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    try:
        require_room(folder / file.name)
    except OSError as error:
        raise WrongUseError(f"{file} cannot be saved: {error.strerror}; name another file") from error


def _train(trainer: Trainer, saving: Saving, steps: int, device: torch.device) -> int:
    reports: list[StepReport] = []
    with StopRequests() as stop, progress(TextColumn("loss {task.fields[loss]}")) as bar:
        task = bar.begin("train", total=steps, completed=trainer.step, loss="-")
        while trainer.step < steps and stop.received is None:
            try:
                report = trainer.take_step()
            except ValueError as error:  # the model refuses the batch before anything is computed
                raise WrongUseError(str(error)) from error
            except (NotFiniteError, FloatingPointError, torch.OutOfMemoryError) as error:
                saving.save(trainer)
                raise CommandError(str(error)) from error
            reports.append(report)
            say_above(bar, _line(report, steps, device))
            bar.update(task, completed=report.step, loss=f"{report.loss:.3f}")
            if report.step % saving.every == 0:
                saving.save(trainer)
        saving.save(trainer)
    _conclude(reports, saving, steps, stopped=stop.received is not None)
    return stop.exit_code if trainer.step < steps else ExitCode.GOOD


def _line(report: StepReport, steps: int, device: torch.device) -> str:
    return (
        f"step {report.step:>{len(str(steps))}}/{steps}  loss {report.loss:.4f}  "
        f"{report.tokens_per_second:>9,.0f} tokens/s  {_memory(report, device)}"
    )


def _memory(report: StepReport, device: torch.device) -> str:
    """The peaks so far, on the device and in pinned memory; of the whole process without a device."""
    if device.type == "cuda":
        where, peak = "device", torch.cuda.max_memory_allocated(device)
    else:
        # Kibibytes on Linux, bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        where, peak = "memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"{where} {peak / MIB:,.0f} MiB  pinned {report.pinned_bytes / MIB:,.0f} MiB"


def _conclude(reports: list[StepReport], saving: Saving, steps: int, *, stopped: bool) -> None:
    if reports:
        # Single batches differ a lot: compare the means of a few at both ends.
        few = max(1, min(10, len(reports) // 4))
        first, last = (sum(r.loss for r in part) / few for part in (reports[:few], reports[-few:]))
        say(f"loss {first:.3f} -> {last:.3f} nats a byte in {len(reports)} steps (means of {few})")
    if saving.file is not None:
        say(f"saved in {saving.file}")
    if stopped and (not reports or reports[-1].step < steps):
        how = (
            "the same command with --resume goes on"
            if saving.file is not None
            else "nothing was saved; --checkpoint.file FILE makes a run resumable"
        )
        sys.stderr.write(f"interrupted after step {reports[-1].step if reports else 0}; {how}\n")


def _dry_run(config: TrainConfig) -> int:
    with torch.device("meta"):  # no memory
        model = build_model(replace(config, device=torch.device("meta")))
    budget = model.pinned_budget(
        batch_size=config.run.batch_size, sequence_length=config.run.sequence_length, device=config.device
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    say(f"{parameters:,} parameters, {trained:,} of them trained, on {config.device.type}")
    say(f"CPU memory for the checkpoints of {config.run.batch_size} x {config.run.sequence_length} tokens:")
    for name, size in budget.rows():
        say(f"  {name:<30} {size:>16,} bytes")
    return ExitCode.GOOD
