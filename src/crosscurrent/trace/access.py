"""What an op reads and writes, from its schema.

``signature(func)`` is computed once per overload. A schema says which arguments are written (``Tensor(a!)``),
which results are views (``Tensor(a)``) and which are new. The tables below hold what schemas do not say:
arguments of which only the shape is looked at, writes that overwrite without reading, results that are
views although they are declared new, running statistics that are updated in silence, gradients that are
only written when there is a scale to take out of them, and ops during which the host waits.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import torch


class Use(IntFlag):
    """What an op does with one argument."""

    NOTHING = 0
    READ = 1
    WRITE = 2
    UPDATE = 3
    MANY = 4
    """The argument is a list of tensors."""


class Kind(IntEnum):
    """How an op is turned into records. All but ``PLAIN`` and ``NOTHING`` have rules of their own."""

    PLAIN = 0
    NOTHING = 1
    EMPTY = 2
    COPY = 3
    TO_COPY = 4
    FOREACH_COPY = 5
    WAITS = 6
    INDEX = 7
    RESIZE = 8
    PIN = 9
    RECORD_STREAM = 10
    BATCH_NORM = 11
    CUSTOM = 12
    OPAQUE = 13
    FUSED = 14


class Signature(NamedTuple):
    """One overload, digested."""

    name: str
    kind: Kind
    positional: tuple[int, ...]
    """``Use`` of each argument that can be passed by position (the schema's order)."""
    by_name: dict[str, int]
    makes_tensors: bool
    """Whether some result is declared new."""
    wait: str
    """The kind of the wait in the middle of the op, for ``WAITS``."""
    grows: bool
    """Whether an output argument may be resized by the op (``out=`` variants)."""
    why_unknown: str = ""
    singles: tuple[tuple[int, int], ...] | None = None
    """Position and ``Use`` of each argument that is one tensor; None if there are lists of tensors."""
    named: frozenset[str] = frozenset()
    """The names of all tensor arguments, and lists of them."""
    may_move: bool = False
    """Whether the storage of the first argument may grow, and so move, although no content is touched."""


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Only shape, dtype and device of the (first) argument are looked at.
_METADATA_ONLY = _names(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty"
    " new_empty_strided new_zeros new_ones new_full _new_zeros_with_same_feature_meta"
    " _nested_get_jagged_dummy"
)
_EMPTY = _names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
# Declared to be views, but a copy when they have to be (seen where composite ops are not taken apart).
_MAYBE_COPIES = _names("reshape reshape_as contiguous flatten ravel resolve_conj resolve_neg type_as to cpu")
# Nothing of any tensor's content is touched.
_TOUCHES_NOTHING = _names(
    "_fused_sdp_choice _use_cudnn_ctc_loss _use_miopen_ctc_loss qscheme q_scale q_zero_point"
    " q_per_channel_axis get_device is_signed is_distributed retains_grad element_size _is_zerotensor"
    " _nested_get_ragged_idx "
    "_unsafe_view _reshape_alias lift lift_fresh set_ set_data _assert_tensor_metadata is_same_size"
    " is_set_to _has_compatible_shallow_copy_type _has_same_storage_numel is_pinned size stride"
    " storage_offset sym_size sym_stride sym_storage_offset sym_numel numel dim _version is_coalesced"
    " _nested_tensor_size _nested_tensor_strides _nested_tensor_storage_offsets _efficientzerotensor"
    " is_contiguous sym_is_contiguous is_strides_like_format is_non_overlapping_and_dense"
    " _debug_has_internal_overlap result_type can_cast is_complex is_floating_point is_conj is_neg"
    " is_inference is_leaf output_nr retain_grad requires_grad_ _backward broadcast_tensors _conj"
    " _neg_view resolve_conj resolve_neg sparse_dim dense_dim _dimI _dimV _nnz cudnn_is_acceptable"
)
# In place, but the old content does not matter.
_OVERWRITES = _names(
    "zero_ fill_ copy_ normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ eye_"
    " _foreach_zero_ _foreach_copy_"
)
_WAITS = {
    "_local_scalar_dense": "item",
    "item": "item",
    "is_nonzero": "item",
    "equal": "item",
    "allclose": "item",
    "_choose_qparams_per_tensor": "item",
    "_nested_tensor_from_mask_left_aligned": "item",
    "_linalg_check_errors": "item",
    "nonzero": "data-dependent shape",
    "nonzero_numpy": "data-dependent shape",
    "argwhere": "data-dependent shape",
    "masked_select": "data-dependent shape",
    "_unique": "data-dependent shape",
    "_unique2": "data-dependent shape",
    "unique_dim": "data-dependent shape",
    "unique_consecutive": "data-dependent shape",
    "unique_dim_consecutive": "data-dependent shape",
    "bincount": "data-dependent shape",
    "cholesky": "item",
    "linalg_eig": "item",
    "linalg_lstsq": "item",
    "_linalg_eigh": "item",
    "_linalg_svd": "item",
    "_linalg_eigvals": "item",
}
# The host waits or not, depending on the arguments.
_INDEX = _names(
    "index index_put_ index_put _index_put_impl_ _unsafe_index _unsafe_index_put repeat_interleave"
    " masked_fill masked_fill_ index_fill index_fill_ normal histc"
)
_RESIZE = _names("resize_ resize_as_")
_PIN = _names("pin_memory _pin_memory")
_BATCH_NORM = _names("native_batch_norm cudnn_batch_norm miopen_batch_norm")
# Optimizers that write gradients back if, and only if, they unscale them: if there is a ``grad_scale``.
_FUSED = _names("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_")
# These update running statistics whenever they are given some.
_STATISTICS = _names("batch_norm_update_stats batch_norm_gather_stats batch_norm_gather_stats_with_counts")
_KINDS = {
    "copy_": Kind.COPY,
    "_to_copy": Kind.TO_COPY,
    "copy": Kind.TO_COPY,
    "_foreach_copy_": Kind.FOREACH_COPY,
    "record_stream": Kind.RECORD_STREAM,
}
_BY_BASE = (
    (_EMPTY, Kind.EMPTY),
    (_RESIZE, Kind.RESIZE),
    (_PIN, Kind.PIN),
    (_INDEX, Kind.INDEX),
    (_BATCH_NORM, Kind.BATCH_NORM),
    (_FUSED, Kind.FUSED),
    (frozenset(_WAITS), Kind.WAITS),
)
# Higher-order ops that only read their tensors.
_FUNCTIONAL_HIGHER_ORDER = _names("flex_attention flex_attention_backward")


def signature(func: Any) -> Signature:
    """Digest one overload, or a higher-order op."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _higher_order(func)
    base = base_name(func)
    positional = tuple(int(_use(argument, base)) for argument in schema.arguments)
    if base in _METADATA_ONLY:
        positional = (0, *positional[1:])
    if base == "resize_as_":
        positional = (positional[0], 0, *positional[2:])
    returns_new = base in _MAYBE_COPIES or any(
        result.alias_info is None and "Tensor" in str(result.type) for result in schema.returns
    )
    kind = _kind(schema, base, positional)
    why = ""
    if schema.name.startswith(("c10d::", "_c10d_functional::")):
        why = "a collective runs on a stream of its own"
    by_name = dict(zip((argument.name for argument in schema.arguments), positional, strict=True))
    lists = any(use & Use.MANY for use in positional)
    return Signature(
        name=str(func),
        kind=Kind.OPAQUE if why else kind,
        positional=positional,
        by_name=by_name,
        makes_tensors=returns_new,
        wait=_WAITS.get(base, "data-dependent shape"),
        grows=any(argument.is_out for argument in schema.arguments),
        why_unknown=why,
        singles=None if lists else tuple((place, use) for place, use in enumerate(positional) if use),
        named=frozenset(name for name, use in by_name.items() if use),
        may_move=base == "set_" and "size" in by_name,
    )


def runner(func: Any) -> Any:
    """What to call in place of an op.

    An overload does nothing when it is called but call this: one Python frame less for each op.
    """
    return func._op if type(func) is torch._ops.OpOverload else func


def base_name(func: Any) -> str:
    """The op's name without namespace and overload."""
    return str(func._schema.name).rpartition("::")[2]


def in_training(sign: Signature) -> Signature:
    """A batch norm that also updates its running statistics, in silence."""
    return _with(sign, dict.fromkeys(list(sign.by_name)[3:5], Use.UPDATE))


def unscaled(sign: Signature) -> Signature:
    """A fused optimizer without a scale: it reads the gradients, and leaves them as they are."""
    return _with(sign, {"grads": Use.READ | Use.MANY})


def _with(sign: Signature, uses: dict[str, Use]) -> Signature:
    by_name = {name: int(uses.get(name, use)) for name, use in sign.by_name.items()}
    return sign._replace(kind=Kind.PLAIN, positional=tuple(by_name.values()), by_name=by_name, singles=None)


def _use(argument: Any, base: str) -> int:
    kind = str(argument.type)
    if "Tensor" not in kind:
        return Use.NOTHING
    many = Use.MANY if "List" in kind or "[]" in kind else Use.NOTHING
    alias = argument.alias_info
    if alias is None or not alias.is_write:
        updated = base in _STATISTICS and argument.name in ("running_mean", "running_var")
        return Use.UPDATE if updated else Use.READ | many
    overwritten = argument.is_out or base in _OVERWRITES
    return (Use.WRITE if overwritten else Use.UPDATE) | many


def _kind(schema: Any, base: str, positional: tuple[int, ...]) -> Kind:
    if any(argument.is_out for argument in schema.arguments):
        if base in _EMPTY:
            return Kind.EMPTY
        if base in _BATCH_NORM:
            return Kind.BATCH_NORM
        return Kind.INDEX if base in _INDEX else Kind.WAITS if base in _WAITS else Kind.PLAIN
    if base in _KINDS:
        return _KINDS[base]
    if base == "where" and len(positional) == 1:
        return Kind.WAITS  # where(condition) is nonzero
    for names, kind in _BY_BASE:
        if base in names:
            return kind
    writes = any(use & Use.WRITE for use in positional)
    is_view = (
        base not in _MAYBE_COPIES
        and bool(schema.returns)
        and all(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    )
    if base in _TOUCHES_NOTHING or schema.name.startswith("prim::") or (is_view and not writes):
        return Kind.NOTHING
    # In-place changes of shape and strides only: ``t_``, ``unsqueeze_``, ``as_strided_``, ``detach_`` ...
    if writes and torch.Tag.inplace_view in _tags(schema.name, schema.overload_name):
        return Kind.NOTHING
    return Kind.PLAIN if schema.name.startswith(("aten::", "prims::")) else Kind.CUSTOM


def _tags(name: str, overload: str) -> list[Any]:
    packet: Any = torch.ops
    for part in name.split("::"):
        packet = getattr(packet, part)
    return list(getattr(packet, overload or "default").tags)


def _higher_order(func: Any) -> Signature:
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    functional = name in _FUNCTIONAL_HIGHER_ORDER
    why = "" if functional else "a higher-order op: its tensors are taken to be read, its results to be new"
    return Signature(name, Kind.OPAQUE, (), {}, True, "", False, why)
