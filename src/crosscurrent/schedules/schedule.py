"""A schedule as data: a short string that a person can paste back.

    cc1:3fa9c1d2e0b4:random.17:-:8c1f
    cc1:3fa9c1d2e0b4:ranks.AAwCAQ:12=7+512,15=9:02d7

The parts: the format's version; the program's fingerprint; the order, by a recipe or in full; whose
memory was handed to whom (``new=old+shift``); and a checksum. In full, an order is written as the rank of
each operation among those that are still to run, in program order: zeros where the program's order is
kept. Equal ranks that follow each other are counted.
"""

from __future__ import annotations

import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from crosscurrent.schedules.errors import DamagedError, ProgramMismatchError, VersionError
from crosscurrent.schedules.order import Linear
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.reuse import Reuse, places
from crosscurrent.schedules.strategies import from_recipe

VERSION = "cc1"
"""The version of schedule strings. It also stands for what recipes and fingerprints mean."""

_IN_FULL = "ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One way in which a program could have run: an order, and whose memory was handed to whom."""

    program: str
    """The fingerprint of the program."""

    linear: Linear
    reuse: tuple[Reuse, ...] = ()
    recipe: str = ""
    """A name for the order, if it has one."""

    def __str__(self) -> str:
        order = self.recipe or f"{_IN_FULL}.{_pack(ranks(self.linear))}"
        reuse = ",".join(map(_reuse_text, self.reuse)) or "-"
        text = f"{VERSION}:{self.program}:{order}:{reuse}"
        return f"{text}:{_checksum(text)}"

    @classmethod
    def parse(cls, text: str, program: Program) -> Schedule:
        """Read a schedule of ``program``.

        Raises ``DamagedError``, ``VersionError`` or ``ProgramMismatchError``, whichever it is.
        """
        if not isinstance(text, str):
            raise TypeError(f"a schedule is a text such as {VERSION}:..., got {text!r}")
        fields = text.strip().split(":")
        if not fields[0].startswith("cc") or not fields[0][2:].isdecimal():
            raise DamagedError(f"this is no schedule: it should start with {VERSION!r}, got {text[:20]!r}")
        if fields[0] != VERSION:
            raise VersionError(
                f"the schedule has version {fields[0]!r}, this crosscurrent reads {VERSION!r}; "
                "make it again, or install the version that made it"
            )
        if len(fields) != 5 or _checksum(":".join(fields[:4])) != fields[4]:
            raise DamagedError("the schedule is damaged: its checksum does not fit; copy the whole string")
        _, fingerprint, order_text, reuse_text, _ = fields
        if fingerprint != program.fingerprint:
            raise ProgramMismatchError(
                f"the schedule belongs to program {fingerprint}, and this is program {program.fingerprint}: "
                "its ops, lanes, waits or memory are not the same"
            )
        try:
            reuse = tuple(map(_reuse_of, reuse_text.split(","))) if reuse_text != "-" else ()
            order = program.order(reuse)
            places(program.records, reuse)
            name, _, rest = order_text.partition(".")
            in_full = name == _IN_FULL
            linear = from_ranks(_unpack(rest), len(order)) if in_full else from_recipe(order, order_text)
        except ValueError as error:
            raise DamagedError(f"the schedule cannot be read: {error}") from error
        if not order.allows(linear):
            raise DamagedError("the schedule breaks the order of the program: it runs something too early")
        return cls(program=fingerprint, linear=linear, reuse=reuse, recipe="" if in_full else order_text)


def ranks(linear: Sequence[int]) -> Iterator[int]:
    """By step: how many of the operations that are still to run come earlier in program order."""
    waiting = sorted(linear)
    for node in linear:
        rank = bisect_left(waiting, node)
        del waiting[rank]
        yield rank


def from_ranks(steps: Iterable[int], length: int) -> Linear:
    """The inverse of ``ranks``. Raises ``ValueError`` if it names no order of ``length`` operations."""
    waiting = list(range(length))
    linear = []
    for rank in steps:
        if rank >= len(waiting):
            raise ValueError(f"it has more than the {length} operations of the program")
        linear.append(waiting.pop(rank))
    return (*linear, *waiting)


def _pack(steps: Iterable[int]) -> str:
    """Run lengths of (rank, count), the zeros at the end left out, as variable-length integers."""
    runs = [(rank, sum(1 for _ in same)) for rank, same in groupby(steps)]
    if runs and runs[-1][0] == 0:
        runs.pop()
    raw = b"".join(_varint(rank) + _varint(count) for rank, count in runs)
    packed = zlib.compress(raw, 9)
    shortest = b"\0" + raw if len(raw) <= len(packed) else b"\1" + packed
    return urlsafe_b64encode(shortest).decode().rstrip("=")


def _unpack(text: str) -> Iterator[int]:
    shortest = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    try:
        raw = shortest[1:] if shortest[:1] == b"\0" else zlib.decompress(shortest[1:])
    except zlib.error as error:
        raise ValueError(str(error)) from error
    numbers = []
    number = shift = 0
    for byte in raw:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    if shift or len(numbers) % 2:
        raise ValueError("it ends in the middle of a number")
    for rank, count in zip(numbers[::2], numbers[1::2], strict=True):
        for _ in range(count):
            yield rank


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _reuse_text(choice: Reuse) -> str:
    shift = f"{choice.shift:+d}" if choice.shift else ""
    return f"{choice.block}={choice.old}{shift}"


def _reuse_of(text: str) -> Reuse:
    block, _, rest = text.partition("=")
    sign = "-" if "-" in rest else "+"
    old, _, shift = rest.partition(sign)
    return Reuse(int(block), int(old), int(sign + shift) if shift else 0)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()) & 0xFFFF:04x}"
