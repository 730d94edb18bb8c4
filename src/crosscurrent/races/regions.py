"""Whether two regions of one block share a byte, decided exactly.

A region is ``run`` contiguous bytes repeated along strided dimensions, so two regions share a byte
exactly when a bounded linear Diophantine inequality has a solution: with ``d = b.start - a.start``,

    sum(i_k * s_k) - sum(j_k * t_k)  lies in  [d - (a.run - 1), d + (b.run - 1)]

for loop counters ``0 <= i_k < n_k`` and ``0 <= j_k < m_k``. Replacing ``j_k`` by ``m_k - 1 - j_k``
makes every coefficient positive, equal strides merge into one counter, and what remains is a sum
of positive terms that has to fall into an interval (the problem is the one that NumPy's
``shares_memory`` solves; it is NP-hard in general, and easy for the views that programs make).

Cheap tests come first: intervals, then the gcd of all strides. The exact search fixes the counters
from the largest stride down; bounds and the gcd of the rest leave one or two values for each in any
nested layout. The last two counters are decided together by a Euclidean descent, in logarithmic
time. A search that passes ``SEARCH_LIMIT`` steps anyway answers ``MAYBE``, which callers must treat
as an overlap that is not certain.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from enum import Enum
from functools import lru_cache
from math import gcd

from crosscurrent.trace.records import Region

SEARCH_LIMIT = 20_000
"""Steps of the exact search (some 20 ms) before it gives up. The views of a program take tens."""


class Overlap(Enum):
    """What is known about two regions."""

    NO = "no"
    YES = "yes"
    MAYBE = "maybe"


class Cover:
    """A growing set of bytes, as disjoint intervals: which regions lie wholly within it?"""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def holds(self, region: Region) -> bool:
        """Whether all bytes from the region's first to its last are in the set."""
        at = bisect_right(self._starts, region.start) - 1
        return at >= 0 and region.stop <= self._stops[at]

    def add(self, region: Region) -> None:
        """Add a region's bytes, if it is contiguous."""
        if region.dims:
            return
        first = bisect_left(self._stops, region.start)
        last = bisect_right(self._starts, region.stop)
        start = min([region.start, *self._starts[first:last][:1]])
        stop = max([region.stop, *self._stops[first:last][-1:]])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]


def contains(outer: Region, inner: Region) -> bool:
    """Whether every byte of ``inner`` is known to be one of ``outer``'s; False may mean unknown."""
    if outer.dims:
        return outer == inner
    return outer.start <= inner.start and inner.stop <= outer.stop


def overlap(a: Region, b: Region) -> Overlap:
    """Whether ``a`` and ``b``, regions of one block, share a byte."""
    if a.stop <= b.start or b.stop <= a.start:
        return Overlap.NO
    if not a.dims and not b.dims:
        return Overlap.YES
    if a is b or a == b:
        return Overlap.YES
    return _strided_overlap(a, b)


@lru_cache(maxsize=1 << 14)
def _strided_overlap(a: Region, b: Region) -> Overlap:
    shift = b.start - a.start
    low = shift - (a.run - 1)
    high = shift + (b.run - 1)
    reach: dict[int, int] = {}
    for count, stride in a.dims:
        reach[stride] = reach.get(stride, 0) + count - 1
    for count, stride in b.dims:
        reach[stride] = reach.get(stride, 0) + count - 1
        low += stride * (count - 1)
        high += stride * (count - 1)
    return _Search(sorted(reach.items(), reverse=True)).solve(low, high)


class _Search:
    """Whether ``sum(stride * x)`` with ``0 <= x <= last`` can fall into an interval."""

    def __init__(self, terms: list[tuple[int, int]]) -> None:
        self._terms = terms
        self._gcds = [0] * (len(terms) + 1)
        self._reach = [0] * (len(terms) + 1)
        for k in range(len(terms) - 1, -1, -1):
            stride, last = terms[k]
            self._gcds[k] = gcd(self._gcds[k + 1], stride)
            self._reach[k] = self._reach[k + 1] + stride * last
        self._failed: set[tuple[int, int]] = set()
        self._steps = 0

    def solve(self, low: int, high: int) -> Overlap:
        try:
            return Overlap.YES if self._reachable(0, low, high) else Overlap.NO
        except _TooHardError:
            return Overlap.MAYBE

    def _reachable(self, k: int, low: int, high: int) -> bool:
        """Whether the terms from ``k`` on can sum to a value in ``[low, high]``."""
        low = max(low, 0)
        high = min(high, self._reach[k])
        if low > high:
            return False
        if low == 0 or high == self._reach[k]:
            return True
        divisor = self._gcds[k]
        if high // divisor * divisor < low:
            return False
        left = len(self._terms) - k
        if left == 1:
            return True
        if left == 2:
            return self._two_terms(self._terms[k], self._terms[k + 1], low, high)
        if (k, low) in self._failed:
            return False
        self._steps += 1
        if self._steps > SEARCH_LIMIT:
            raise _TooHardError
        stride, last = self._terms[k]
        fewest = max(0, -((self._reach[k + 1] - low) // stride))
        most = min(last, high // stride)
        for x in range(fewest, most + 1):
            if self._reachable(k + 1, low - stride * x, high - stride * x):
                return True
        # The interval keeps its width from level to level unless it was clipped at an end, where
        # the answer is known at once; so its lower end names the subproblem.
        self._failed.add((k, low))
        return False

    @staticmethod
    def _two_terms(large: tuple[int, int], small: tuple[int, int], low: int, high: int) -> bool:
        """Exactly, in logarithmic time: the remainder of ``high - large * x`` must be small."""
        stride, last = large
        step, reach = small[0], small[0] * small[1]
        fewest = max(0, -((reach - low) // stride))
        most = min(last, high // stride)
        if fewest > most:
            return False
        width = high - low
        if width >= step - 1:
            return True
        # x = fewest + n is a solution when (high - stride * x) mod step <= width. The bounds on x
        # keep the quotient, the other counter, between 0 and its last value.
        offset = (high - stride * fewest) % step
        first = _first_in_window(stride % step, step, (offset - width) % step, width)
        return first is not None and first <= most - fewest


class _TooHardError(Exception):
    """The exact search passed its limit."""


def _first_in_window(a: int, modulus: int, start: int, width: int) -> int | None:
    """The least ``n >= 0`` for which ``a * n mod modulus`` lies in the cyclic window.

    The window holds ``start, start + 1, ... start + width`` modulo ``modulus``; None if no ``n`` does.
    """
    if start == 0 or start + width >= modulus:
        return 0
    return _first_between(a, modulus, start, start + width)


def _first_between(a: int, modulus: int, low: int, high: int) -> int | None:
    """The least ``n >= 0`` with ``low <= a * n mod modulus <= high``, for ``0 < low <= high < modulus``.

    Either a multiple of ``a`` lies between the ends before the first wrap, or the number of wraps
    solves the same problem modulo ``a``. Counting down instead when ``a`` is more than half of the
    modulus halves it at every other step, as in Euclid's algorithm.
    """
    if a == 0:
        return None
    if 2 * a > modulus:
        return _first_between(modulus - a, modulus, modulus - high, modulus - low)
    n = -(-low // a)
    if a * n <= high:
        return n
    # No multiple of a lies in [low, high], so neither end is 0 modulo a and they do not wrap.
    wraps = _first_between(modulus % a, a, -high % a, -low % a)
    if wraps is None:
        return None
    return -(-(low + modulus * wraps) // a)
