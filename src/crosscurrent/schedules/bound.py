"""Turns the actions of a program into calls with everything bound, on the memory of one arena.

A result that the op would allocate is written where it lay in the recorded run: through the op's
``out=`` variant where it has one, else by a copy. And an op can be called through its Python binding, which
takes half the time of calling the overload. What is as good is decided by trying: once, in program order,
it has to give the same values as the op as it was recorded, which is what is left if nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crosscurrent.schedules.arena import Arena
from crosscurrent.schedules.errors import NotReplayableError
from crosscurrent.schedules.program import Action, Call, Given, View, poison_of

Step = Callable[[], Any]

# The bindings as they are, whatever somebody put in their place in ``torch`` and ``torch.Tensor``.
_methods: Any = torch._C.TensorBase
_functions: Any = torch._C._VariableFunctions


class Bound(NamedTuple):
    """An action with everything bound."""

    options: list[Step]
    """The ways to run it, the fastest first. All but the last have to be tried before use."""

    targets: list[Tensor]
    """What it writes."""


_COPIES = frozenset({"aten::_to_copy", "aten::clone", "aten::copy_", "aten::contiguous", "aten::_pin_memory"})
"""Ops that do nothing but copy their first tensor, or the second to the first: ``copy_`` does it."""

_PLACEMENT = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"})
"""Arguments that say where a result goes, which ``out=`` says better."""


class ShapeChangedError(RuntimeError):
    """A result whose shape depends on values has another shape than in the recorded run."""


def bind(action: Action, arena: Arena) -> Bound:
    """Bind an action to the memory that it works on."""
    if isinstance(action, Given):
        return Bound([_given(action, arena)], [])
    if action.func in ("aten::copy_", "aten::copy_.default") and action.random is None:
        return Bound([_copy(action, arena)], [])
    func = resolve(action.func)
    args = _bind(action.args, arena)
    kwargs = _bind(dict(action.kwargs), arena)
    targets = [None if view is None else arena.view(view) for view in action.results]
    changed = _changed(func, args)
    steps: list[Step] = []
    if action.random is None:
        steps = _in_place(func, args, kwargs) if changed else _direct(action, func, args, kwargs, targets)
    call = partial(getattr(func, "_op", func), *args, **kwargs)
    step = call if not any(target is not None for target in targets) else _with_copies(call, targets)
    steps.append(step if action.random is None else _seeded(step, action.random))
    return Bound(steps, [*changed, *(target for target in targets if target is not None)])


def settle(bound: Bound) -> int:
    """Run an action, and choose: the first option that gives the values of the last, the op as recorded."""
    recorded = bound.options[-1]
    if len(bound.options) == 1:
        recorded()
        return 0
    before = [target.clone() for target in bound.targets]
    recorded()
    wanted = [target.clone() for target in bound.targets]
    for choice, option in enumerate(bound.options[:-1]):
        for target, value in zip(bound.targets, before, strict=True):
            target.copy_(value)
        try:
            option()
        except Exception:  # this overload wants something else
            continue
        if all(map(same_values, bound.targets, wanted)):
            return choice
    for target, value in zip(bound.targets, wanted, strict=True):
        target.copy_(value)
    return len(bound.options) - 1


def resolve(func: str | Callable[..., Any]) -> Callable[..., Any]:
    """The op of a name. Raises ``NotReplayableError`` if this PyTorch has no such op."""
    if not isinstance(func, str):
        return func
    namespace, _, name = func.partition("::")
    base, _, overload = name.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        raise NotReplayableError(
            f"the program calls {func}, which is not registered here; import the package that registers it"
        ) from None
    assert callable(found)
    return found  # type: ignore[no-any-return]


def _bind(value: Any, arena: Arena) -> Any:
    """Arguments as the op takes them: views become tensors of the arena, devices become its device."""
    if isinstance(value, View):
        return arena.view(value)
    if isinstance(value, Tensor):
        return value.to(arena.bytes.device)
    if isinstance(value, torch.device):
        return arena.bytes.device
    if isinstance(value, dict):
        # Memory is the arena's; whether it was pinned matters to the order only, and is in the records.
        return {name: _bind(item, arena) for name, item in value.items() if name != "pin_memory"}
    if isinstance(value, list | tuple):
        return type(value)(_bind(item, arena) for item in value)
    return value


def _copy(action: Call, arena: Arena) -> Step:
    target, source = (_bind(arg, arena) for arg in action.args[:2])
    return partial(_methods.copy_, target, source)


def _changed(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """The tensors that an op changes in place, by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    pairs = zip(schema.arguments, args, strict=False)
    changed = [value for argument, value in pairs if argument.alias_info and argument.alias_info.is_write]
    return [tensor for tensor in flat(changed) if isinstance(tensor, Tensor)]


def _in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Step]:
    """The method of a tensor that does the same, if the op changes its first argument and no other."""
    name = func._schema.name.rpartition("::")[2]
    method = getattr(_methods, name, None) if _has_binding(func, args) else None
    if method is None or not isinstance(args[0], Tensor) or len(_changed(func, args)) != 1:
        return []
    # What is set before a trial must be what the op finds: no two elements at one place.
    if torch._debug_has_internal_overlap(args[0]) != 0:
        return []
    return [partial(method, *args, **kwargs)]


def _has_binding(func: Any, args: Sequence[Any]) -> bool:
    """Whether the Python binding of an op takes the same arguments: not so for a factor given by position,
    which it would take for that of an older signature."""
    return func.namespace == "aten" and all(a.name != "alpha" for a in func._schema.arguments[: len(args)])


def _direct(
    action: Call, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Tensor | None]
) -> list[Step]:
    """Ways to run the op straight into its targets, if there are any."""
    outs = [target for target in targets if target is not None]
    if not outs or len(outs) != len(targets) or not isinstance(action.func, str):
        return []
    if action.func.partition(".")[0] in _COPIES and isinstance(args[0], Tensor):
        return [partial(_methods.copy_, outs[0], args[0])]
    found = out_variant(func)
    if found is None:
        return []
    variant, names = found
    if len(names) != len(outs):
        return []
    kept = {
        name: value for name, value in kwargs.items() if name not in _PLACEMENT or name in _names(variant)
    }
    into = dict(zip(names, outs, strict=True))
    step = partial(variant._op, *args, **kept, **into)
    function = getattr(_functions, func._schema.name.rpartition("::")[2], None)
    if function is None or len(outs) != 1 or not _has_binding(func, args):
        return [step]
    return [partial(function, *args, **kept, out=outs[0]), step]


@lru_cache(maxsize=1 << 12)
def out_variant(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload of an op that writes into given tensors, and the names of these; None if there is none."""
    schema = getattr(func, "_schema", None)
    # A variant whose result has a shape that depends on values would resize its target, and the arena.
    if schema is None or torch.Tag.dynamic_output_shape in func.tags:
        return None
    # Trying a variant runs the op twice, which must not change anything but its results.
    if "batch_norm" in schema.name or any(argument.alias_info for argument in schema.arguments):
        return None
    wanted = [
        (argument.name, str(argument.type))
        for argument in schema.arguments
        if argument.name not in _PLACEMENT
    ]
    packet = func.overloadpacket
    for overload in packet.overloads():
        variant = getattr(packet, overload)
        arguments = variant._schema.arguments
        outs = tuple(argument.name for argument in arguments if argument.is_out)
        rest = [
            (argument.name, str(argument.type))
            for argument in arguments
            if not argument.is_out and argument.name not in _PLACEMENT
        ]
        if outs and len(outs) == len(schema.returns) and rest == wanted:
            return variant, outs
    return None


@lru_cache(maxsize=1 << 12)
def _names(func: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in func._schema.arguments)


def _with_copies(call: Step, targets: Sequence[Tensor | None]) -> Step:
    """Run the op and copy what it returns to where it lay."""

    def run() -> None:
        out = call()
        results = flat(out)
        for target, result in zip(targets, results, strict=False):
            if target is None:
                continue
            if result is None:
                raise ShapeChangedError("it returns one tensor less than when recorded")
            if not isinstance(result, Tensor):
                target.fill_(result)
            elif result.shape != target.shape:
                raise ShapeChangedError(
                    f"its result has shape {tuple(result.shape)}, and had {tuple(target.shape)} when recorded"
                )
            else:
                target.copy_(result)

    return run


def _seeded(step: Step, state: Tensor) -> Step:
    def run() -> None:
        before = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            step()
        finally:
            torch.set_rng_state(before)

    return run


def _given(action: Given, arena: Arena) -> Step:
    reads = [(arena.view(view), value.to(arena.bytes.device)) for view, value in action.reads]
    writes = [(arena.view(view), value.to(arena.bytes.device)) for view, value in action.writes]
    poison = [torch.full_like(value, poison_value(value.dtype)) for _, value in writes]

    def run() -> None:
        as_recorded = all(same_values(seen, value) for seen, value in reads)
        for (target, value), spoiled in zip(writes, poison, strict=True):
            target.copy_(value if as_recorded else spoiled)

    return run


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """A value of poisoned memory of this type."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    return int.from_bytes(bytes([poison_of(dtype)]) * dtype.itemsize, "little")


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values: the same bits, except that every NaN is the same NaN."""
    return not bool(different(one, other).any())


def different(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors of one shape and type hold different values."""
    one, other = one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg()
    if one.dtype.is_complex:
        return different(torch.view_as_real(one), torch.view_as_real(other)).any(-1)
    if not one.dtype.is_floating_point:
        return one != other
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    apart = one.contiguous().view(bits) != other.contiguous().view(bits)
    if one.dtype.itemsize == 1:  # the 8-bit formats have no isnan
        one, other = one.float(), other.float()
    return apart & ~(one.isnan() & other.isnan())


def flat(out: Any) -> list[Any]:
    """What an op returns, as one list."""
    if isinstance(out, list | tuple):
        return [item for part in out for item in flat(part)]
    return [out]
