"""Result files: whole or not there, and never one of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosscurrent.cli.exits import WrongUseError
from crosscurrent.cli.files import result_file, write_json


def test_no_file_asked_for_is_no_file() -> None:
    assert result_file(None) is None


def test_results_of_an_earlier_run_are_gone_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    assert result_file(str(path)) == path
    assert not path.exists()


def test_the_file_is_found_again_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = result_file("out.json")
    assert path is not None
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write_json(path, {"a": 1})
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 1}


@pytest.mark.parametrize("name", ["missing/out.json", "."])
def test_a_place_where_nothing_can_be_written_is_wrong_use(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongUseError):
        result_file(name)


def test_content_that_is_no_json_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "out.json", {"a": object()})
    assert list(tmp_path.iterdir()) == []
