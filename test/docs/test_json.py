"""``docs/json.md`` names the fields that ``bench`` writes; ``test/cli/test_json_docs.py`` holds the rest."""

from __future__ import annotations

import re
from pathlib import Path

from crosscurrent.bench.document import as_json as bench_document

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")


def test_bench() -> None:
    section = PAGE.split("\n## `crosscurrent bench`\n", 1)[1].split("Names end", 1)[0]
    values = {"equal", "different", "no verdict"}
    assert set(re.findall(r"`(\w+)`", section)) - values == bench_document([], {}).keys()
