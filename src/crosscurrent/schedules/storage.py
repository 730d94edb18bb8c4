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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from crosscurrent.checks import file_path
from crosscurrent.schedules.errors import DamagedError, NotReplayableError, VersionError
from crosscurrent.schedules.program import Action, Buffer, Call, Given, HostRead, Program, View
from crosscurrent.trace import records as trace
from crosscurrent.trace.records import Access, Lane, MemoryKind, Record, Region, Site, TraceInfo

FORMAT = "crosscurrent program"
VERSION = "1"

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


def save(program: Program, path: str | Path) -> None:
    """Write a program to a file. Raises ``NotReplayableError`` if a part of it lives in this process only."""
    tensors = _Tensors()
    body = {
        "records": [[type(record).__name__, *map(_plain, record[1:])] for record in program.records],
        "lanes": [list(lane) for lane in program.info.lanes],
        "sites": [list(site) for site in program.info.sites],
        "buffers": [
            [block, buffer.nbytes, buffer.fill, tensors.add_if(buffer.initial)]
            for block, buffer in program.buffers.items()
        ],
        "actions": [
            [index, [_action(action, tensors) for action in actions]]
            for index, actions in program.actions.items()
        ],
        "host_reads": [[list(view), name] for view, name in program.host_reads],
        "names": [[name, list(view)] for name, view in program.names.items()],
        "recorded": [[name, tensors.add(value)] for name, value in program.recorded.items()],
        "device": program.device,
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "program": text,
        "checksum": _checksum(text, tensors.by_name),
    }
    save_file(tensors.by_name, str(path), metadata=metadata)


def load(path: str | Path) -> Program:
    """Read a program from a file.

    Raises ``DamagedError`` or ``VersionError``, whichever it is, and ``OSError`` where there is no such file.
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
    if _checksum(text, tensors) != metadata.get("checksum"):
        raise DamagedError(f"{path} is damaged: its checksum does not fit its content")
    try:
        return _program(json.loads(text), tensors)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path} is damaged: it holds something that no program holds ({error})"
        ) from error


class _Tensors:
    """The tensors of a file, by name; equal ones are stored as often as they come."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def add(self, tensor: Tensor) -> str:
        name = f"t{len(self.by_name)}"
        self.by_name[name] = tensor.detach().contiguous().clone()
        return name

    def add_if(self, tensor: Tensor | None) -> str | None:
        return None if tensor is None else self.add(tensor)


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """A field of a record."""
    if isinstance(value, MemoryKind):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _action(action: Action, tensors: _Tensors) -> Any:
    if isinstance(action, Given):
        pairs = ([[list(view), tensors.add(value)] for view, value in side] for side in action)
        return ["given", *pairs]
    if not isinstance(action.func, str):
        raise NotReplayableError(
            f"the program calls {action.func}, which lives in this process only; replay it here, it cannot "
            "be saved"
        )
    results = [None if view is None else list(view) for view in action.results]
    args, kwargs = _encode(action.args, tensors), _encode(dict(action.kwargs), tensors)
    return ["call", action.func, args, kwargs, results, tensors.add_if(action.random)]


def _encode(value: Any, tensors: _Tensors) -> Any:
    """An argument of a call."""
    if isinstance(value, View):
        return {"view": list(value)}
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
    if value is None or isinstance(value, bool | int | float | str):
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
