"""``docs/json.md`` and the documents hold the same fields, whichever object one looks at, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscurrent.bench.comparison import Outcome, compare
from crosscurrent.bench.configurations import CONFIGURATIONS
from crosscurrent.bench.counts import Role, count
from crosscurrent.bench.document import Verdict
from crosscurrent.bench.document import as_json as bench_document
from crosscurrent.bench.measurements import FlagResult, Peaks, Profile, Result, StepTimes
from crosscurrent.bench.rates import Rates
from crosscurrent.bench.roofline import roofline
from crosscurrent.cli import main
from crosscurrent.report.costs import Direction
from crosscurrent.report.overlap import Activity, Blocked, Timeline, analyse
from crosscurrent.stress.campaign import Failure
from crosscurrent.stress.history import PAST_RACES, HistoryEvidence, Shown
from crosscurrent.stress.mutations import Mutant, Score
from crosscurrent.trace.records import WAIT_KINDS, Site

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
SIMULATE = () if torch.cuda.is_available() else ("--simulate",)
SITE = frozenset({"file", "line", "function"})

CHECK = {
    "": "## `crosscurrent check`",
    "program": "The program:",
    "findings": "A finding:",
    "findings.first": "An access:",
    "findings.second": "An access:",
    "findings.also": "A further pair:",
    "findings.also.first": "An access:",
    "findings.also.second": "An access:",
    "findings.proof": "A proof:",
    "findings.proof.changes": "A change:",
    "host_waits": "A host wait:",
    "unknown": "A call that was not understood:",
    "advice": "A piece of advice:",
    "advice.protects": "A finding:",
    "advice.protects.first": "An access:",
    "advice.protects.second": "An access:",
    "advice.protects.also": "A further pair:",
    "advice.protects.also.first": "An access:",
    "advice.protects.also.second": "An access:",
}
PART = "A part of the transfers:"
OVERLAP = {
    "": "## `crosscurrent overlap`",
    "program": "The program:",
    "by_direction": PART,
    "by_stream": PART,
    "by_site": PART,
    "copies": PART,
    "blocked_by": "A call that held the host up:",
    "bounds": "Bounds:",
    "bounds.obstacles": "An obstacle:",
}
DOCTOR = {"": "## `crosscurrent doctor`", "results": "An examination:"}
VERIFY = {"": "## `crosscurrent verify`", "results": "A result:"}
FLAG = {
    "": "What was measured with a flag:",
    ".all_steps": "The times of a step:",
    ".overlap": "The overlap of a step, a shorter form of what [`overlap`](#crosscurrent-overlap) writes, "
    "times in nanoseconds too:",
    ".overlap.by_direction": PART,
    ".overlap.by_stream": PART,
    ".overlap.host_waits_at": "A wait of the host in a step:",
}
BENCH = {
    "": "## `crosscurrent bench`",
    "results": "What was measured of a configuration:",
    **{f"results.{flag}{path}": title for flag in ("off", "on") for path, title in FLAG.items()},
    "results.ratio": "A ratio:",
    "results.roofline": "A roofline:",
    "results.roofline.forward": "The bound of a pass:",
    "results.roofline.backward": "The bound of a pass:",
    "results.rates": "The rates of a device:",
    "results.rates.products": "A product, of a linear map `y = x W^T`:",
    "results.comparison": "A comparison:",
}

PROGRAM = """\
import torch
import torch.distributed as dist

host = torch.empty(8, pin_memory=True)
side = torch.cuda.Stream()
for _ in range(2):
    x = torch.ones(8, device="cuda")
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
        x.add_(1)
    del x
    weight = torch.ones(512, 512).to("cuda", non_blocking=True)
    y = weight @ weight
side.synchronize()
print(host.sum().item() + y[0, 0].item())
torch.ones(2, device="cuda").to_dense().numpy(force=True).data.tobytes()
"""
TRANSFERS = """\
import torch

copies = torch.cuda.Stream()
weights = [torch.randn(512, 512).pin_memory() for _ in range(3)]
x = torch.randn(2048, 512, device="cuda")
for host in weights:
    with torch.cuda.stream(copies):
        weight = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    x = x @ weight
"""
HIDDEN = """\
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(y)
dist.destroy_process_group()
"""


def documented(title: str) -> frozenset[str]:
    """The fields in the first column of the table that follows a line."""
    assert PAGE.count(f"\n{title}\n") == 1, title
    table = PAGE.split(f"\n{title}\n", 1)[1].split("| field |", 1)[1].split("\n\n", 1)[0]
    return frozenset(
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    )


def objects(value: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object of a document, and where it is."""
    if isinstance(value, dict):
        yield path, value
        for key, item in value.items():
            yield from objects(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from objects(item, path)


def require_documented(document: Any, titles: Mapping[str, str], *, may_lack: Mapping[str, str] = {}) -> None:
    """Each object has the fields that its table names; each table that is named has an object."""
    seen = set()
    for path, each in objects(document):
        if path == "errors":  # by the names of what could not be measured
            continue
        if path.endswith(("freed_at", "stack")):
            assert SITE <= each.keys() <= SITE | {"stack"}, path
            continue
        seen.add(path)
        fields = documented(titles[path]) - ({may_lack[path]} if path in may_lack else set())
        assert each.keys() - {"stack"} == fields, f"{path or 'the document'} is not as in {titles[path]!r}"
    assert seen == titles.keys(), "this document shows too little"


def written(path: str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("options", [(), ("--full_stack",)])
def test_check(options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM + HIDDEN, encoding="utf-8")
    command = ["check", *SIMULATE, *options, "--prove", "--advice", "--json", "check.json", "program.py"]
    assert main(command) == 1
    document = written("check.json")
    require_documented(document, CHECK, may_lack={"advice.protects": "proof"})
    assert any(finding["freed_at"] for finding in document["findings"])
    kinds = {wait["kind"] for wait in document["host_waits"]}
    row = PAGE.split("A host wait:", 1)[1].split("| `kind` |", 1)[1].split("\n", 1)[0]
    assert kinds <= set(re.findall(r'"([\w -]+)"', row)) == set(WAIT_KINDS) - {"query"}
    assert main(["check", *SIMULATE, "--json", "check.json", "program.py"]) == 1
    assert written("check.json").keys() == documented(CHECK[""]) - {"advice"}


def test_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(TRANSFERS, encoding="utf-8")
    assert main(["overlap", *SIMULATE, "--json", "overlap.json", "program.py"]) == 0
    document = written("overlap.json")
    titles = OVERLAP if document["bounds"] else {k: v for k, v in OVERLAP.items() if "bounds" not in k}
    require_documented(document, titles)


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crosscurrent.cli import checkup

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkup, "EXAMINATIONS", {"python": checkup.EXAMINATIONS["python"]})
    assert main(["doctor", "--json", "doctor.json"]) == 0
    require_documented(written("doctor.json"), DOCTOR)


def test_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "--layers", "exactness", "--json", "verify.json"]) == 0
    require_documented(written("verify.json"), VERIFY)


def test_score_of_mutants() -> None:
    mutants = (
        Mutant(kind="drop", place="loop", what="wait_event", killed_by="a race"),
        Mutant(kind="drop", place="loop", what="record", killed_by="", reason="nothing reads it"),
    )
    score = Score(mutants=mutants).as_json()
    assert score.keys() == documented("A score:")
    table = PAGE.split("A score:", 1)[1].split("\n## ", 1)[0]
    for part in ("by_kind_and_place", "survivors"):
        row = table.split(f"| `{part}` |", 1)[1].split("\n", 1)[0]
        assert set(re.findall(r"`(\w+)`", row)) == score[part][0].keys()


def test_races_of_the_past() -> None:
    told = HistoryEvidence(
        (
            Shown(race=PAST_RACES[0], finding="x", witness="", delayed=None),
            Shown(race=None, finding="", witness="", delayed=None),
        )
    )
    for each in told.as_json():
        assert each.keys() == documented("A race of the past:")


def test_stress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(
        [
            "stress",
            "--seeds",
            "1",
            "--policies",
            "lastrec",
            "--quantizers",
            "default",
            "--json",
            "stress.json",
        ]
    )
    require_documented(written("stress.json"), {"": "## `crosscurrent stress`"})
    failure = asdict(Failure(case="lastrec, default", seed=None, what="x")) | {"repeat": "the command"}
    assert failure.keys() == documented("A failure:")


def test_bench() -> None:
    copy = Activity(0, 40, 0, "stream 7", "Memcpy HtoD", Direction.HOST_TO_DEVICE, 4096)
    wait = Blocked(0, 30, "item", Site("train.py", 3, "step"))
    seen = analyse(Timeline(activities=[copy], blocked=[wait], stop=50))
    flag = FlagResult(
        times=(StepTimes(forward=1.0, backward=2.0, host_forward=0.5, host_backward=0.5),),
        peaks=Peaks(device=1, pinned=1, pinned_is_measured=True),
        profile=Profile(overlap=seen, waits=seen.blocked_by),
    )
    counts = count(CONFIGURATIONS["cpu-small"])
    rates = Rates(
        products=dict.fromkeys(counts.products, 1.0),
        overall=1.0,
        to_device=1.0,
        to_host=1.0,
        to_device_at_once=1.0,
        to_host_at_once=1.0,
        copy_bytes=1,
    )
    outcome = Outcome(loss=torch.ones(()), gradients={"weight": torch.ones(2)})
    result = Result(
        configuration=CONFIGURATIONS["cpu-small"],
        device="made up",
        off=flag,
        on=flag,
        comparison=compare(outcome, outcome),
        rates=rates,
        roofline=roofline(counts, rates),
    )
    document = bench_document([result], {"h200-a": "RuntimeError: no device"})
    require_documented(document, BENCH)
    for row, values in (
        ('| `verdict` | `"equal"`', {each.value for each in Verdict}),
        ("| `role` |", {each.value for each in Role}),
        ("| `clock` |", {document["results"][0]["clock"], "CUDA events"}),
    ):
        told = PAGE.split(f"\n{row}", 1)[1].split("\n", 1)[0]
        assert set(re.findall(r'"([\w -]+)"', row + told)) == values
