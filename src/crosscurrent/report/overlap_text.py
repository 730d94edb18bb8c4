"""The analysis of overlap in words and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crosscurrent.report.source import bytes_of, percent, place_of, time_of

if TYPE_CHECKING:
    from crosscurrent.report.bounds import Bounds, Obstacle
    from crosscurrent.report.overlap import Overlap, Part
    from crosscurrent.trace.records import Site

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]

WORTH_SAYING = 0.02
"""Share of the run below which a possible gain is called small."""

MOST_ROWS = 12


def definitions() -> str:
    """What the words mean."""
    return (
        "Intervals are united, not added: a moment in which two copies run counts once. Transfer: a copy "
        "between host and device, or between devices, runs. Kernel: the device computes, or copies within "
        "itself. Hidden: both at once on one device; hidden share = |transfer and kernel| / |transfer|. "
        "Exposed: transfer without kernel. Parts that run at once share moments, and may sum to more than "
        "the whole. Times of several devices are added."
    )


def sentences(overlap: Overlap) -> tuple[str, ...]:
    """What it comes to, the most important first."""
    found: list[str] = []
    if overlap.modelled:
        found.append(f"This is a model, not a measurement: {overlap.modelled}.")
    found += _hidden(overlap)
    found += _why_small(overlap)
    if overlap.num_pageable:
        verb = "is" if overlap.num_pageable == 1 else "are"
        found.append(
            f"{overlap.num_pageable:,} of {overlap.num_copies:,} copies {verb} with pageable memory: "
            "the host takes part in them and cannot run ahead. Pin the buffers once, and copy with "
            "`non_blocking=True`."
        )
    found += _blocked(overlap)
    if overlap.bounds is not None:
        found += _bounds(overlap, overlap.bounds)
    return tuple(found)


def _hidden(overlap: Overlap) -> list[str]:
    share = overlap.hidden_share
    if share is None:
        return ["There is no transfer between host and device: nothing to hide."]
    return [
        f"{percent(share)} of the transfer time ran behind kernels: {time_of(overlap.hidden)} of "
        f"{time_of(overlap.transfer)}; {time_of(overlap.exposed)} was exposed."
    ]


def _why_small(overlap: Overlap) -> list[str]:
    """Why better overlap would gain little, where that is so."""
    if not overlap.total or not overlap.transfer:
        return []
    gain = overlap.exposed / overlap.total
    could = (
        f"Hiding all of the rest would save at most {time_of(overlap.exposed)} of {time_of(overlap.total)}"
    )
    if overlap.transfer <= WORTH_SAYING * overlap.total:
        return [f"{could} ({percent(gain)}): there is little to transfer. The time goes elsewhere."]
    if gain <= WORTH_SAYING:
        return [f"{could} ({percent(gain)}): the transfers are hidden already."]
    if overlap.transfer > overlap.kernel:
        return [
            f"Copies take longer than kernels ({time_of(overlap.transfer)} and {time_of(overlap.kernel)}): "
            f"kernels can hide at most {percent(overlap.kernel / overlap.transfer)} of them. "
            "Move fewer bytes (quantize, recompute), or compute more for each."
        ]
    return [f"{could} ({percent(gain)})."]


def _blocked(overlap: Overlap) -> list[str]:
    found = []
    if overlap.blocked_by:
        worst = overlap.blocked_by[0]
        calls = sum(part.num for part in overlap.blocked_by)
        share = overlap.blocked / overlap.total if overlap.total else 0
        noun = "call" if calls == 1 else "calls"
        where = "" if worst.site is None else f" at {place_of(worst.site)}"
        found.append(
            f"The host was blocked in {calls:,} {noun} for {time_of(overlap.blocked)} ({percent(share)}); "
            f"the longest were {worst.call}{where}, {time_of(worst.time)}. While blocked it issues nothing."
        )
    else:
        found.append("The host was blocked nowhere.")
    if overlap.num_devices and overlap.idle > 0.2 * overlap.total * overlap.num_devices:
        reason = (
            "the host waits instead of issuing"
            if overlap.blocked > overlap.idle // 2
            else "the host does not issue fast enough, or the program does other things"
        )
        found.append(f"The device did nothing for {time_of(overlap.idle)}: {reason}.")
    return found


def _bounds(overlap: Overlap, bounds: Bounds) -> list[str]:
    found = [
        f"The run took {time_of(overlap.total)}; its sync edges and host waits would allow "
        f"{time_of(bounds.edges)} (critical path, issuing for free). Nothing can beat "
        f"{time_of(bounds.busiest)}: the busiest lane has as much to do ({bounds.busiest_name})."
    ]
    if bounds.edges - bounds.device_edges > WORTH_SAYING * bounds.edges:
        found.append(f"Without the host waits, the edges would allow {time_of(bounds.device_edges)}.")
    helpful = [obstacle for obstacle in bounds.obstacles if obstacle.gain > WORTH_SAYING * bounds.edges]
    if helpful:
        worst = helpful[0]
        found.append(
            f"In the way stands {_wait(worst)}: without it the edges would allow "
            f"{time_of(bounds.edges - worst.gain)}. Whether it is needed, the advice says."
        )
    elif bounds.edges - bounds.busiest <= WORTH_SAYING * bounds.edges:
        found.append(
            "The busiest lane is the critical path: no change of order makes it shorter, only less work."
        )
    else:
        found.append(
            "No single wait stands in the way: work that must follow other work, or shares a lane with it, "
            "makes up the critical path."
        )
    return found


def _wait(obstacle: Obstacle) -> str:
    return f"`{obstacle.call}`" + ("" if obstacle.site is None else f" at {place_of(obstacle.site)}")


def tables(overlap: Overlap) -> list[Table]:
    """Title, columns and rows; a table without rows has nothing to show."""
    columns = ("", "Copies", "Bytes", "Time", "Hidden", "Exposed")
    whats = (
        ("By direction", "Direction", overlap.by_direction),
        ("By stream", "Stream", overlap.by_stream),
        ("By call site", "Call site", overlap.by_site),
    )
    found: list[Table] = [
        (title, (first, *columns[1:]), [_row(part) for part in parts[:MOST_ROWS]])
        for title, first, parts in whats
    ]
    found.append(
        (
            "Most exposed copies",
            ("Copy", "Bytes", "Time", "Exposed"),
            [
                (part.name, bytes_of(part.nbytes), time_of(part.time), time_of(part.exposed))
                for part in overlap.copies
            ],
        )
    )
    found.append(
        (
            "Calls that blocked the host",
            ("Call", "Times", "Time", "Where"),
            [
                (part.call, f"{part.num:,}", time_of(part.time), _place(part.site))
                for part in overlap.blocked_by[:MOST_ROWS]
            ],
        )
    )
    if overlap.bounds is not None:
        found.append(
            (
                "Waits on the critical path",
                ("Wait", "Shorter without it by"),
                [
                    (_wait(obstacle).replace("`", ""), time_of(obstacle.gain))
                    for obstacle in overlap.bounds.obstacles
                ],
            )
        )
    return found


def _row(part: Part) -> tuple[str, ...]:
    share = percent(part.hidden / part.time) if part.time else "-"
    return (
        part.name,
        f"{part.num:,}",
        bytes_of(part.nbytes),
        time_of(part.time),
        share,
        time_of(part.exposed),
    )


def _place(site: Site | None) -> str:
    return "unknown place" if site is None else f"{place_of(site)} {site.function}".strip()
