"""Sets of moments as half-open intervals of whole numbers.

A *span set* is a list of ``(start, stop)`` with ``start < stop``, sorted, and with a gap between any
two: ``united`` makes one of any intervals. Uniting is what keeps two copies that run at once from
being counted twice. All the other functions take and give span sets, in linear time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def united(intervals: Iterable[Span]) -> list[Span]:
    """The moments that lie in any of the intervals. Empty intervals hold none."""
    spans: list[Span] = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if spans and start <= spans[-1][1]:
            if stop > spans[-1][1]:
                spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
    return spans


def length(spans: Iterable[Span]) -> int:
    """How much time a span set holds."""
    return sum(stop - start for start, stop in spans)


def common(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """The moments that lie in both."""
    spans: list[Span] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start = max(one[i][0], other[j][0])
        stop = min(one[i][1], other[j][1])
        if start < stop:
            spans.append((start, stop))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return spans


def without(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """The moments that lie in the first and not in the second."""
    spans: list[Span] = []
    j = 0
    for start, stop in one:
        while j < len(other) and other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < stop:
            if start < other[k][0]:
                spans.append((start, other[k][0]))
            start = other[k][1]
            k += 1
        if start < stop:
            spans.append((start, stop))
    return spans
