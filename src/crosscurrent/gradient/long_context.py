"""The gradient of a transformer with bounded KV caches over sequences far longer than the caches.

Usage:

    model = LongContextGradientModel(gpt_model, head_model, cache=CacheConfig(...), grad=GradientArgs(...))
    print(model.pinned_budget(batch_size=1, sequence_length=65536).rows())
    loss = model(input_ids, targets)      # an ordinary scalar with a grad_fn
    (loss / num_batches).backward()       # scaling, accumulation, optimizers: as anywhere

The gradient is exact: that of the function which the forward pass computes, with its evictions taken as
they are. Device memory does not grow with the sequence (token ids aside), CPU memory does.

One backward pass at a time: the checkpoints of a loss are overwritten by the next forward pass that has
gradients. Forward passes under `torch.no_grad()` leave them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crosscurrent.checks import whole_number
from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.backward_pass import BackwardPass
from crosscurrent.gradient.batch import load_batch
from crosscurrent.gradient.call import Call, Setup, trainable
from crosscurrent.gradient.checkpoints import CheckpointFormat, Shapes
from crosscurrent.gradient.forward_pass import ForwardPass
from crosscurrent.gradient.graphs import Graphs, choice_of_kernels
from crosscurrent.gradient.guard import watch_gradients, watch_parameters
from crosscurrent.gradient.plan import make_plan
from crosscurrent.gradient.store import CheckpointStore, PinnedBudget, pinned_budget
from crosscurrent.gradient.transfer import Lanes, Uploads
from crosscurrent.kvcache.names import CacheConfig, PolicyKind
from crosscurrent.kvcache.placement import GroupedEviction
from crosscurrent.kvcache.replay_log import ReplayLog
from crosscurrent.model.transformer import Head, Transformer


class CheckpointsGoneError(RuntimeError):
    """The checkpoints that this backward pass needs were overwritten by a later forward pass."""


class LongContextGradientModel(nn.Module):
    """A loss whose gradient is computed cell by cell, from checkpoints in CPU memory."""

    def __init__(
        self, gpt_model: Transformer, head_model: Head, *, cache: CacheConfig, grad: GradientArgs
    ) -> None:
        super().__init__()
        self.gpt_model = gpt_model
        self.head_model = head_model
        self._cache, self._args = cache, grad
        self._lanes: Lanes | None = None
        self._uploads: Uploads | None = None
        self._store: CheckpointStore | None = None
        self._log = ReplayLog(self._setup.num_layers)
        self._format: tuple[object, CheckpointFormat] | None = None
        self._graphs = Graphs(enabled=grad.cuda_graphs)
        _check_cache(self._setup)

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of `targets` [B, T'], which belong to the last T' of `input_ids` [B, T].

        Targets of -100 are ignored. Raises ValueError for a bad batch, and FloatingPointError for parameters
        that are not finite (on a GPU under `nan_guard`), before anything is changed; torch.OutOfMemoryError
        with the sizes that were asked for.
        """
        parameters = trainable(self._setup) if torch.is_grad_enabled() else []
        self._check_state(parameters)
        call = self._make_call(input_ids, targets)
        # In CPU memory a look costs no wait.
        if self._args.nan_guard or call.device.type == "cpu":
            with _sizes_in_errors(call):
                watch_parameters(self).check()
        if parameters:
            loss: Tensor = _Loss.apply(self, call, *parameters)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                loss = self._run_forward(call, store=None)
        return loss

    def pinned_budget(
        self, *, batch_size: int, sequence_length: int, device: torch.device | str | None = None
    ) -> PinnedBudget:
        """CPU memory that the checkpoints of such a batch take. Allocates nothing.

        ``device``: where the model will be, if it is not there yet.
        """
        whole_number("batch_size", batch_size, least=1)
        whole_number("sequence_length", sequence_length, least=1)
        fmt = self._make_format(batch_size, sequence_length)
        num_ids = batch_size * sequence_length
        where = self._device() if device is None else torch.device(device)
        return pinned_budget(fmt.sizes(), self._args, where, num_ids=num_ids)

    def pinned_bytes(self) -> int:
        """Pinned memory that PyTorch's allocator holds for the buffers that there are by now, in bytes."""
        return sum(each.pinned_bytes for each in (self._store, self._uploads) if each is not None)

    def replay_log(self) -> ReplayLog:
        """The evictions of the last forward pass with gradients, as a copy. Waits for the device."""
        if self._lanes is not None:
            self._lanes.synchronize()
        return _copied(self._log)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have streams, graphs and CPU buffers of their own, made when first needed."""
        fresh = {
            "_log": ReplayLog(self._setup.num_layers),
            "_graphs": Graphs(enabled=self._args.cuda_graphs),
        }
        return self.__dict__ | {"_lanes": None, "_uploads": None, "_store": None} | fresh

    @property
    def _setup(self) -> Setup:
        """Of the modules as they are: a user may have put others in their place."""
        return Setup(gpt_model=self.gpt_model, head_model=self.head_model, cache=self._cache, args=self._args)

    def _device(self) -> torch.device:
        return self.gpt_model.embedding.weight.device

    def _make_format(self, batch_size: int, sequence_length: int) -> CheckpointFormat:
        """How a batch is cut and kept. The last one is remembered: most batches are as the one before."""
        model = self.gpt_model
        key = batch_size, sequence_length, model.embedding.weight.dtype, model.config, len(model.layers)
        if self._format is None or self._format[0] != key:
            self._format = key, self._new_format(batch_size, sequence_length)
        return self._format[1]

    def _new_format(self, batch_size: int, sequence_length: int) -> CheckpointFormat:
        args, config = self._args, self.gpt_model.config
        lengths = tuple(self._cache.length(layer) for layer in range(self._setup.num_layers))
        plan = make_plan(
            sequence_length,
            cache_lengths=lengths,
            chunk_size=args.chunk_size,
            layers_per_cell=args.layers_per_cell,
            chunks_per_cell_multiplier=args.chunks_per_cell_multiplier,
        )
        shapes = Shapes(
            batch_size=batch_size,
            embed_size=config.embed_size,
            num_groups=config.groups,
            head_size=config.head_dim,
            cache_lengths=lengths,
            dtype=self.gpt_model.embedding.weight.dtype,
        )
        return CheckpointFormat(plan, shapes, self._cache, args)

    def _make_call(self, input_ids: Tensor, targets: Tensor) -> Call:
        if self._uploads is None or self._uploads.device != self._device():
            self._uploads = Uploads(self._device())
        with _sizes_in_errors(partial(_sizes_of_batch, input_ids, targets)):
            batch = load_batch(
                input_ids,
                targets,
                vocab_size=self.gpt_model.config.vocab_size,
                uploads=self._uploads,
                dtype=torch.promote_types(self.gpt_model.embedding.weight.dtype, torch.float32),
            )
        fmt = self._make_format(*input_ids.shape)
        if self._cache.policy is PolicyKind.DENSE:
            _check_dense(fmt)
        embedding_trains = any(p.requires_grad for p in self.gpt_model.embedding.parameters())
        trains = [any(p.requires_grad for p in layer.parameters()) for layer in self.gpt_model.layers]
        rows = [row.index for row in fmt.plan.rows if any(trains[layer] for layer in row.layers)]
        return Call(
            setup=self._setup,
            fmt=fmt,
            ids_BT=batch.ids_BT,
            targets_BT=batch.targets_BT,
            first_target=batch.first_target,
            count=batch.count,
            first_row=0 if embedding_trains else min(rows, default=len(fmt.plan.rows)),
            embedding_trains=embedding_trains,
            trains=tuple(p.requires_grad for p in self.parameters()),
            graphs=self._graphs,
            log=ReplayLog(self._setup.num_layers),
        )

    def _check_state(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse, before anything is changed, what would fail or be wrong later."""
        _check_cache(self._setup)
        _check_parameters(self)
        device = self._device()
        for name in ("async_cpu_transfer", "cuda_graphs"):
            if getattr(self._args, name) and device.type != "cuda":
                raise ValueError(
                    f"grad.{name} needs the model on a CUDA device, but it is on {device}; move it there, or "
                    f"set grad.{name} to False"
                )
        if torch.is_autocast_enabled(device.type):
            raise ValueError(
                f"torch.autocast is on for {device.type}: caches and checkpoints have the dtype of the "
                "parameters, and the backward pass computes each layer again outside of it; leave autocast, "
                "and cast the model instead (model.bfloat16())"
            )
        lora = self.gpt_model.config.lora
        if parameters and lora is not None and lora.dropout > 0 and self.gpt_model.training:
            raise ValueError(
                f"lora.dropout is {lora.dropout}: the backward pass computes each layer again and would drop "
                "other values; set lora.dropout to 0, or call eval() on the model"
            )

    def _signature(self, call: Call) -> object:
        """What the work of a pass depends on without being given it. See `Graphs`.

        What trains may have changed since the call was made: its backward pass goes by both.
        """
        parameters = [(p.data_ptr(), p.dtype, p.requires_grad) for p in self.parameters()]
        training = [module.training for module in self.modules()]
        return call.fmt.shapes, call.trains, parameters, training, choice_of_kernels()

    @contextmanager
    def _lanes_open(self, call: Call) -> Iterator[Lanes]:
        """The lanes for one pass. Whatever happens in it, memory may be freed when it has ended."""
        if self._args.cuda_graphs:
            self._graphs.begin(self._signature(call), self._device())
        if self._lanes is None or self._lanes.device != self._device():
            self._lanes = Lanes(asynchronous=self._args.async_cpu_transfer, device=self._device())
        self._lanes.open()
        try:
            yield self._lanes
        except BaseException:
            self._lanes.abandon()
            self._graphs.drop()
            raise
        self._lanes.close()

    def _run_forward(self, call: Call, store: CheckpointStore | None) -> Tensor:
        with _sizes_in_errors(call), self._lanes_open(call) as lanes:
            # Named, so that its double buffers outlive the lanes' last wait.
            forward_pass = ForwardPass(call, lanes, store)
            return forward_pass.run()

    def _run_checkpointed(self, call: Call) -> Tensor:
        if self._store is None or self._store.device != call.device:
            self._store = CheckpointStore(self._args, call.device)
        # From here on the checkpoints are nobody's, until they are all there.
        self._log = ReplayLog(self._setup.num_layers)
        self._store.reserve(call.fmt.sizes())
        loss = self._run_forward(call, self._store)
        self._log = call.log
        return loss

    def _run_backward(
        self, call: Call, grad_loss: Tensor, parameters: Sequence[nn.Parameter]
    ) -> list[Tensor | None]:
        if self._log is not call.log or self._store is None:
            raise CheckpointsGoneError(
                "the checkpoints of this loss were overwritten by a later forward pass; call backward() "
                "before the next forward pass, or make that one under torch.no_grad()"
            )
        with _sizes_in_errors(call), self._lanes_open(call) as lanes, _emptied_queue(call.device):
            # Named, so that its double buffers outlive the lanes' last wait.
            backward_pass = BackwardPass(call, lanes, self._store, parameters)
            gradients = backward_pass.run(grad_loss)
        if self._args.nan_guard:
            with _sizes_in_errors(call):
                watch_gradients(self, parameters, gradients).check()
        return gradients


class _Loss(torch.autograd.Function):
    """One node of the caller's graph, from the parameters that train to the loss."""

    @staticmethod
    def forward(ctx: Any, model: LongContextGradientModel, call: Call, *parameters: nn.Parameter) -> Tensor:
        ctx.model, ctx.call, ctx.parameters = model, call, parameters
        # Saved, so that autograd refuses a backward pass after an optimizer step, and a second one.
        ctx.save_for_backward(*parameters)
        return model._run_checkpointed(call)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the long-context gradient has no gradient of its own: expected a backward pass without "
                "create_graph, got one with create_graph=True"
            )
        _ = ctx.saved_tensors
        return None, None, *ctx.model._run_backward(ctx.call, grad_loss, ctx.parameters)


@contextmanager
def _sizes_in_errors(sizes: Call | Callable[[], str]) -> Iterator[None]:
    """Add the sizes that were asked for to an out-of-memory error of PyTorch, whose own error type it is on
    every device: its CPU allocator raises a plain RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _CPU_ALLOCATOR not in str(error):
            raise
        said = _sizes_of_call(sizes) if isinstance(sizes, Call) else sizes()
        raise torch.OutOfMemoryError(f"{error}\n{said}") from error


_CPU_ALLOCATOR = "DefaultCPUAllocator"


def _sizes_of_call(call: Call) -> str:
    sizes = ", ".join(f"{name} {size} bytes" for name, size in call.device_sizes())
    return (
        f"The long-context gradient of {list(call.ids_BT.shape)} token ids asked for: {sizes}, and the "
        "activations of one cell. Use fewer grad.layers_per_cell, a smaller grad.chunks_per_cell_multiplier, "
        "a shorter cache or a smaller batch."
    )


def _sizes_of_batch(input_ids: Tensor, targets: Tensor) -> str:
    num_bytes = 8 * input_ids.numel()
    return (
        f"A batch of {list(input_ids.shape)} token ids and {list(targets.shape)} targets asked for twice "
        f"{num_bytes} bytes. Use a shorter sequence or a smaller batch."
    )


@contextmanager
def _emptied_queue(device: torch.device) -> Iterator[None]:
    """Leave nothing in autograd's queue when a backward pass inside is cut short.

    Functions that were ready to run stay there, and with them what their graph has saved, until something
    less urgent is run on that device: functions made earlier are.
    """
    with torch.enable_grad():
        earlier = torch.zeros((), device=device, requires_grad=True).clone()
    try:
        yield
    except BaseException:
        torch.autograd.backward(earlier)
        raise


def _check_cache(setup: Setup) -> None:
    lengths, args = setup.cache.cache_length, setup.args
    if isinstance(lengths, tuple) and len(lengths) != setup.num_layers:
        raise ValueError(
            f"cache_length has {len(lengths)} lengths, but the model has {setup.num_layers} layers; pass one "
            "number, or one for each layer"
        )
    shortest = min(setup.cache.length(layer) for layer in range(setup.num_layers))
    room = shortest - setup.cache.num_grace
    if args.chunk_size > room:
        raise ValueError(
            f"grad.chunk_size is {args.chunk_size}, but the shortest KV cache has {shortest} slots, of which "
            f"{setup.cache.num_grace} hold grace tokens: a chunk can be at most {room} long; use a smaller "
            "chunk size, fewer grace tokens or a longer cache"
        )


def _check_parameters(model: LongContextGradientModel) -> None:
    """One dtype and one device, and a head that can tell every token."""
    first: dict[tuple[torch.dtype, torch.device], str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault((parameter.dtype, parameter.device), name)
    if len(first) > 1:
        seen = ", ".join(f"{name} is {dtype} on {device}" for (dtype, device), name in first.items())
        raise ValueError(
            f"all parameters must have one dtype and be on one device, but {seen}; cast or move the whole "
            "model"
        )
    known, told = model.gpt_model.config.vocab_size, model.head_model.weight.shape[0]
    if told != known:
        raise ValueError(
            f"the model has a vocabulary of {known} tokens, but its head one of {told}; make both from one "
            "ModelConfig"
        )


def _check_dense(fmt: CheckpointFormat) -> None:
    shortest = min(fmt.shapes.cache_lengths)
    if fmt.plan.sequence_length > shortest:
        raise ValueError(
            f"the dense cache keeps every token, but the sequence has {fmt.plan.sequence_length} and the "
            f"shortest cache {shortest} slots; use a longer cache_length, or a policy that evicts "
            "(lastrec, h2o)"
        )


def _copied(log: ReplayLog) -> ReplayLog:
    """A log whose slots no later forward pass overwrites."""
    copy = ReplayLog(len(log))
    for layer in range(len(log)):
        for eviction in log[layer]:
            if isinstance(eviction, GroupedEviction):
                eviction = eviction.with_slots(eviction.slots_BGm.clone())
            copy.append(layer, eviction)
    return copy
