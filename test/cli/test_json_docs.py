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

from crosscurrent.cli import main
from crosscurrent.stress.campaign import Failure
from crosscurrent.stress.history import PAST_RACES, Shown, Told
from crosscurrent.stress.mutations import Mutant, Score
from crosscurrent.trace.records import WAIT_KINDS

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
    told = Told(
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
