"""Result files: whole or not there, and never one of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosscurrent.cli.exits import WrongUseError
from crosscurrent.cli.files import result_file, result_files, write_json
from crosscurrent.files import in_one_act


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


@pytest.mark.parametrize(
    "name", ["missing/out.json", ".", "", "/dev/null", "x" * 300, "a\0b", "/proc/out.json"]
)
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


def test_what_is_cut_short_leaves_the_file_of_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError), in_one_act(tmp_path / "file") as partial:
        partial.write_text("half of the n\udc00", encoding="utf-8")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
    with in_one_act(tmp_path / "file") as partial:
        partial.write_text("new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "new")]


def test_what_is_read_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("source")
    Path("link.json").symlink_to("script.py")
    for name in ("script.py", "./script.py", "link.json"):
        with pytest.raises(WrongUseError, match="what is read"):
            result_file(name, inputs=["script.py"])
    assert Path("script.py").read_text() == "source"


def test_nothing_is_removed_unless_all_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text("old")
    for other in ("missing/out.html", "old.json"):
        with pytest.raises(WrongUseError):
            result_files("old.json", other)
        assert Path("old.json").read_text() == "old"
    assert result_files("old.json", None) == (tmp_path / "old.json", None)
    assert not Path("old.json").exists()
