"""Random programs, racy and repaired."""

from __future__ import annotations

from hypothesis import strategies as st
from race_oracle import Oracle
from race_programs import (
    EXTRA,
    FETCH,
    HOST,
    MAIN,
    STORE,
    WHOLE,
    Step,
    alloc,
    edge,
    free,
    op,
    record,
    records_of,
    sync,
    sync_lanes,
    use_stream,
    wait,
)

from crosscurrent.trace.records import Region

LANES = st.sampled_from([MAIN, FETCH, STORE, EXTRA])
EVENTS = st.sampled_from(["first", "second"])
# Halves, an overlap of both, and combs that interleave: bytes 0-7, 16-23, ... against 8-15, 24-31, ...
REGIONS = st.sampled_from(
    [
        WHOLE,
        WHOLE,
        (0, 32),
        (32, 64),
        (16, 48),
        Region(0, 56, 8, ((4, 16),)),
        Region(8, 64, 8, ((4, 16),)),
        Region(0, 42, 2, ((2, 32), (2, 8))),
    ]
)


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Random steps on live blocks: accesses, events (re-recorded, waited for too early), frees."""
    live = ["device a", "device b", "pinned c"]
    steps: list[Step] = []
    for number in range(draw(st.integers(2, 25))):
        choice = draw(st.sampled_from("oooooorwweeshafau"))
        if choice == "o" and live:
            targets = draw(st.lists(st.tuples(st.sampled_from(live), REGIONS), min_size=1, max_size=3))
            writes = [draw(st.booleans()) for _ in targets]
            pinned = all(block.startswith("pinned") for block, _ in targets)
            lane = draw(st.sampled_from([HOST, MAIN, FETCH])) if pinned else draw(LANES)
            steps.append(
                op(
                    lane,
                    reads=[target for target, is_write in zip(targets, writes, strict=True) if not is_write],
                    writes=[target for target, is_write in zip(targets, writes, strict=True) if is_write],
                    kept=lane != HOST and draw(st.booleans()),
                )
            )
        elif choice == "r":
            steps.append(record(draw(LANES), draw(EVENTS)))
        elif choice == "w":
            steps.append(wait(draw(LANES), draw(EVENTS)))
        elif choice == "e":
            steps.append(edge(draw(LANES), draw(LANES)))
        elif choice == "s":
            steps.append(sync(draw(EVENTS)))
        elif choice == "h":
            steps.append(sync_lanes(draw(LANES)))
        elif choice == "a":
            block = f"{draw(st.sampled_from(['device', 'pinned']))} {number}"
            nbytes = draw(st.sampled_from([64, 64, 128, 1 << 21]))
            steps.append(alloc(draw(st.sampled_from([MAIN, FETCH])), block, nbytes))
            live.append(block)
        elif choice == "f" and live:
            steps.append(free(live.pop(draw(st.integers(0, len(live) - 1)))))
        elif choice == "u" and live:
            steps.append(use_stream(draw(st.sampled_from(live)), draw(LANES)))
    return steps


@st.composite
def repaired_programs(draw: st.DrawFn) -> list[Step]:
    """Random programs without a race: an edge is put before the second op of each until none is left."""
    steps = draw(programs())
    while True:
        records = records_of(steps)
        pairs = Oracle(records).pairs
        if not pairs:
            return steps
        pair = min(pairs, key=lambda pair: (pair.second, pair.first))
        first, second = records[pair.first], records[pair.second]
        through_host = second.lane == HOST or draw(st.integers(0, 4)) == 0
        repair = sync_lanes(first.lane) if through_host else edge(first.lane, second.lane)
        steps.insert(second.site, repair)
