"""The analysis of overlap as a JSON document; times in nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crosscurrent.report.bounds import Bounds
    from crosscurrent.report.overlap import Overlap, Part
    from crosscurrent.trace.records import Site

FORMAT = "crosscurrent overlap"
VERSION = 1
"""It changes when a field changes its meaning or goes, not when one is added."""


def as_json(overlap: Overlap) -> dict[str, object]:
    """The document.

    - ``modelled`` says by which rates the times were made up; empty for measured ones.
    - ``total``, ``kernel``, ``transfer``, ``hidden``, ``exposed``, ``idle``, ``blocked`` are times;
      ``hidden_share`` is a number from 0 to 1, or null without transfers.
    - ``by_direction``, ``by_stream``, ``by_site`` and ``copies`` (the most exposed ones) are lists of parts,
      with ``name``, ``copies``, ``bytes``, ``time``, ``hidden`` and ``exposed``.
    - ``blocked_by`` lists calls, with ``call``, a site, ``times`` and ``time``.
    - ``bounds`` has the makespans, or is null where the sync edges are not known.
    - ``sentences`` say the same in words.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "modelled": overlap.modelled,
        "total": overlap.total,
        "kernel": overlap.kernel,
        "transfer": overlap.transfer,
        "hidden": overlap.hidden,
        "exposed": overlap.exposed,
        "hidden_share": overlap.hidden_share,
        "idle": overlap.idle,
        "blocked": overlap.blocked,
        "copies_made": overlap.num_copies,
        "pageable_copies": overlap.num_pageable,
        "by_direction": [_part(part) for part in overlap.by_direction],
        "by_stream": [_part(part) for part in overlap.by_stream],
        "by_site": [_part(part) for part in overlap.by_site],
        "copies": [_part(part) for part in overlap.copies],
        "blocked_by": [
            {"call": part.call, **_site(part.site), "times": part.num, "time": part.time}
            for part in overlap.blocked_by
        ],
        "bounds": None if overlap.bounds is None else _bounds(overlap.bounds),
        "sentences": list(overlap.sentences),
    }


def _part(part: Part) -> dict[str, object]:
    return {
        "name": part.name,
        "copies": part.num,
        "bytes": part.nbytes,
        "time": part.time,
        "hidden": part.hidden,
        "exposed": part.exposed,
    }


def _bounds(bounds: Bounds) -> dict[str, object]:
    return {
        "edges": bounds.edges,
        "device_edges": bounds.device_edges,
        "busiest": bounds.busiest,
        "busiest_name": bounds.busiest_name,
        "obstacles": [
            {"call": obstacle.call, **_site(obstacle.site), "gain": obstacle.gain}
            for obstacle in bounds.obstacles
        ],
    }


def _site(site: Site | None) -> dict[str, object]:
    if site is None:
        return {"file": None, "line": None, "function": None}
    return {"file": site.file, "line": site.line, "function": site.function}
