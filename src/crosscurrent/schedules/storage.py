"""Programs as files: safetensors, so that nothing in them can run when they are read.

Tensors (the content of memory at the start, values that were kept) are tensors of the file; everything
else is JSON in its metadata, under ``program``. Beside it stand the format and its version, and a checksum
of both, so that a damaged file is known before anything of it is used.

The values of JSON stand for themselves, except objects, which have one key that says what they are:
``{"view": [block, dtype, shape, strides, offset, lazy]}``, ``{"tensor": name}``, ``{"tuple": [...]}``,
``{"torch": "float32"}``, ``{"device": "cpu"}``, ``{"number": "nan"}``, ``{"complex": [re, im]}``,
``{"dict": {...}}``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized
from torch import Tensor

from crosscurrent.checks import file_path
from crosscurrent.schedules.countdown import Countdown, Progress
from crosscurrent.schedules.errors import DamagedError, NotReplayableError, VersionError
from crosscurrent.schedules.program import Action, Buffer, Call, Given, HostRead, Program, View
from crosscurrent.trace import records as trace
from crosscurrent.trace.records import Access, Lane, MemoryKind, Record, Region, Site, TraceInfo

FORMAT = "crosscurrent program"
VERSION = "1"

_PIECE = 1 << 24
"""Bytes that are gone through at once: some ten milliseconds."""

_MOST_HEAD = 100_000_000
"""Bytes before the tensors that safetensors read at most."""

_CHARACTER = 64
"""Bytes of tensors that are gone through in the time that a character takes to be understood."""

_RECORD, _ACTION = 1 << 10, 1 << 14
"""Bytes of tensors that are gone through in the time that a record, or the actions of an op, take to be put
into words."""

_BATCH = 1 << 11
"""Records that are put into words at once: a few milliseconds. For as many actions it is some ten."""

_RECORDS: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        trace.Op,
        trace.Alloc,
        trace.Free,
        trace.UseStream,
        trace.RecordEvent,
        trace.DropEvent,
        trace.WaitEvent,
        trace.HostWait,
        trace.Unknown,
    )
}


def save(program: Program, path: str | Path, *, told: Progress | None = None) -> None:
    """Write a program to a file. Raises ``NotReplayableError`` if a part of it lives in this process only.

    ``told`` is called meanwhile with the bytes that were gone through, and with how many these will be; what
    is not tensors counts for more of them, by the time that it takes.
    """
    countdown = Countdown(told)
    described = _RECORD * (len(program.records) + len(program.buffers)) + _ACTION * len(program.actions)
    held = _num_bytes((program.buffers, program.actions, program.recorded))
    countdown.expect(described + 2 * held)
    tensors = _Tensors()
    records = ((type(record).__name__, *record[1:]) for record in program.records)
    buffers = (
        (block, buffer.nbytes, buffer.fill, tensors.add_if(buffer.initial))
        for block, buffer in program.buffers.items()
    )
    actions = (
        (index, [_action(action, tensors) for action in actions])
        for index, actions in program.actions.items()
    )
    body = {
        "records": _counted_list(records, _RECORD, countdown),
        "lanes": _json(program.info.lanes),
        "sites": _json(program.info.sites),
        "buffers": _counted_list(buffers, _RECORD, countdown),
        "actions": _counted_list(actions, _ACTION, countdown),
        "host_reads": _json(program.host_reads),
        "names": _json(list(program.names.items())),
        "recorded": _json([(name, tensors.add(value)) for name, value in program.recorded.items()]),
        "device": _json(program.device),
    }
    text = "{" + ",".join(f'"{name}":{content}' for name, content in body.items()) + "}"
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "program": text,
        "checksum": _checksum(text, tensors.by_name, countdown),
    }
    _write(path, metadata, tensors.by_name, countdown)


def load(path: str | Path, *, told: Progress | None = None) -> Program:
    """Read a program from a file.

    Raises ``DamagedError`` or ``VersionError``, whichever it is, and ``OSError`` where there is no such file.
    ``told`` is called meanwhile with the bytes that were gone through, and with how many these will be; what
    is not tensors counts for more of them, by the time that it takes.
    """
    file_path("path", path)
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DamagedError(f"{path} is no program of crosscurrent")
            if metadata.get("version") != VERSION:
                raise VersionError(
                    f"{path} has version {metadata.get('version')!r} of the program format, this "
                    f"crosscurrent reads {VERSION!r}; record the program again"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    text = metadata.get("program", "")
    to_understand = _CHARACTER * len(text)
    countdown = Countdown(told)
    countdown.expect(sum(tensor.nbytes for tensor in tensors.values()) + 2 * to_understand)
    if _checksum(text, tensors, countdown) != metadata.get("checksum"):
        raise DamagedError(f"{path} is damaged: its checksum does not fit its content")
    try:
        body = json.loads(text)
        countdown.take(to_understand)
        program = _program(body, tensors)
        countdown.take(to_understand)
        return program
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path} is damaged: it holds something that no program holds ({error})"
        ) from error


class _Tensors:
    """The tensors of a file, by name; equal ones are stored as often as they come."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def add(self, tensor: Tensor) -> str:
        _code(tensor.dtype)  # if there is none, better now than after all else
        name = f"t{len(self.by_name)}"
        self.by_name[name] = tensor.detach().resolve_conj().resolve_neg()
        return name

    def add_if(self, tensor: Tensor | None) -> str | None:
        return None if tensor is None else self.add(tensor)


def _checksum(text: str, tensors: Mapping[str, Tensor], countdown: Countdown) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in _pieces(tensor, countdown):
            digest.update(piece)
    return digest.hexdigest()


def _write(
    path: str | Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], countdown: Countdown
) -> None:
    """Write a file of safetensors. Their own ``save_file`` does not say how far it has come."""
    header: dict[str, object] = {"__metadata__": metadata}
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # so that each is aligned
    stop = 0
    for name in names:
        tensor = tensors[name]
        start, stop = stop, stop + tensor.nbytes
        header[name] = {
            "dtype": _code(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > _MOST_HEAD:
        raise NotReplayableError(
            f"without its values the program takes {len(head):,} bytes, and a file has room for "
            f"{_MOST_HEAD:,}; watch fewer steps, or replay it here"
        )
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            for piece in _pieces(tensors[name], countdown):
                file.write(piece)


def _pieces(tensor: Tensor, countdown: Countdown) -> Iterator[memoryview]:
    """The bytes of a tensor. Each piece counts when the next one is asked for."""
    content = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]
        yield piece
        countdown.take(len(piece))


@cache
def _code(dtype: torch.dtype) -> str:
    """What safetensors call a type."""
    try:
        one = serialized({"x": torch.empty(1, dtype=dtype, device="cpu")})
        described = json.loads(one[8 : 8 + int.from_bytes(one[:8], "little")])["x"]
    except (KeyError, SafetensorError):
        described = {}
    if described.get("shape") != [1]:  # or there are some elements in one, of which they count each
        raise NotReplayableError(f"the program has values of {dtype}, which cannot be saved; replay it here")
    return str(described["dtype"])


def _num_bytes(value: Any) -> int:
    """The bytes of all tensors in a part of a program, however deep."""
    if value is None or isinstance(value, View):
        return 0
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(_num_bytes, value))
    return _num_bytes(list(value.values())) if isinstance(value, Mapping) else 0


def _json(value: Any) -> str:
    # Records and views are tuples, which JSON writes as lists.
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, MemoryKind):
        return value.value
    raise TypeError(f"a program has no {type(value).__name__}")


def _counted_list(items: Iterable[Any], weight: int, countdown: Countdown) -> str:
    """A list of JSON. Each item counts for so many bytes."""
    items = iter(items)
    batches = []
    while batch := list(islice(items, _BATCH)):
        batches.append(_json(batch)[1:-1])
        countdown.take(weight * len(batch))
    return "[" + ",".join(batches) + "]"


def _action(action: Action, tensors: _Tensors) -> Any:
    if isinstance(action, Given):
        pairs = ([(view, tensors.add(value)) for view, value in side] for side in action)
        return ["given", *pairs]
    if not isinstance(action.func, str):
        raise NotReplayableError(
            f"the program calls {action.func}, which lives in this process only; replay it here, it cannot "
            "be saved"
        )
    args, kwargs = _encode(action.args, tensors), _encode(dict(action.kwargs), tensors)
    return ["call", action.func, args, kwargs, action.results, tensors.add_if(action.random)]


def _encode(value: Any, tensors: _Tensors) -> Any:
    """An argument of a call."""
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, View):
        return {"view": value}
    if isinstance(value, Tensor):
        return {"tensor": tensors.add(value)}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": {name: _encode(item, tensors) for name, item in value.items()}}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, float):
        return value
    raise NotReplayableError(
        f"an op has the argument {value!r} of type {type(value).__name__}, which cannot be saved"
    )


def _program(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Program:
    return Program(
        records=tuple(map(_record, range(len(body["records"])), body["records"])),
        info=TraceInfo(
            [Lane(*lane) for lane in body["lanes"]],
            [_site(*site) for site in body["sites"]],
        ),
        buffers={
            block: Buffer(nbytes, fill, None if initial is None else tensors[initial])
            for block, nbytes, fill, initial in body["buffers"]
        },
        actions={
            index: tuple(_read_action(action, tensors) for action in actions)
            for index, actions in body["actions"]
        },
        host_reads=tuple(HostRead(_view(view), name) for view, name in body["host_reads"]),
        names={name: _view(view) for name, view in body["names"]},
        recorded={name: tensors[value] for name, value in body["recorded"]},
        device=body["device"],
    )


def _site(file: str, line: int, function: str, stack: list[list[Any]]) -> Site:
    return Site(file, line, function, tuple((where, at, what) for where, at, what in stack))


def _record(index: int, fields: list[Any]) -> Record:
    name, *rest = fields
    kind = _RECORDS[name]
    if kind is trace.Op:
        lane, op, site, accesses = rest
        return trace.Op(index, lane, op, site, tuple(map(_access, accesses)))
    if kind is trace.Alloc:
        block, lane, nbytes, memory, site, fresh = rest
        return trace.Alloc(index, block, lane, nbytes, MemoryKind(memory), site, fresh)
    record = kind(index, *(tuple(item) if isinstance(item, list) else item for item in rest))
    return record  # type: ignore[no-any-return]


def _access(fields: list[Any]) -> Access:
    block, (start, stop, run, dims), write, shape, dtype, kept = fields
    return Access(block, Region(start, stop, run, tuple(map(tuple, dims))), write, tuple(shape), dtype, kept)


def _view(fields: list[Any]) -> View:
    block, dtype, shape, strides, offset, lazy = fields
    view = View(block, dtype, tuple(shape), tuple(strides), offset, lazy)
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"there is no type {dtype!r}")
    return view


def _read_action(fields: list[Any], tensors: Mapping[str, Tensor]) -> Action:
    if fields[0] == "given":
        sides: Iterable[list[Any]] = fields[1:]
        reads, writes = (tuple((_view(view), tensors[value]) for view, value in side) for side in sides)
        return Given(reads, writes)
    _, func, args, kwargs, results, random = fields
    return Call(
        func,
        _decode(args, tensors),
        _decode(kwargs, tensors),
        tuple(None if view is None else _view(view) for view in results),
        None if random is None else tensors[random],
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "view":
            return _view(content)
        case "tensor":
            return tensors[content]
        case "tuple":
            return tuple(_decode(item, tensors) for item in content)
        case "dict":
            return {name: _decode(item, tensors) for name, item in content.items()}
        case "torch":
            return getattr(torch, content)
        case "device":
            return torch.device(content)
        case "complex":
            return complex(*content)
        case "number":
            return float(content)
    raise ValueError(f"unknown kind of argument {kind!r}")
