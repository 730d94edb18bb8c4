"""Documents and their windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from crosscurrent.train.corpus import IGNORED, Corpus, read_corpus

TEXT = bytes(range(256))


def test_a_target_is_the_byte_after_its_input() -> None:
    batch = Corpus([TEXT]).batch(seed=0, step=0, batch_size=5, length=40)
    assert batch.input_ids_BT.shape == batch.targets_BT.shape == (5, 40)
    assert batch.num_tokens == 200
    torch.testing.assert_close(batch.targets_BT, batch.input_ids_BT + 1)  # the text counts upwards


def test_a_short_document_is_padded_with_targets_that_do_not_count() -> None:
    batch = Corpus([b"abc"]).batch(seed=0, step=0, batch_size=1, length=5)
    assert batch.input_ids_BT.tolist() == [[97, 98, 0, 0, 0]]
    assert batch.targets_BT.tolist() == [[98, 99, IGNORED, IGNORED, IGNORED]]


def test_a_window_never_crosses_into_the_next_document() -> None:
    corpus = Corpus([b"a" * 30, b"b" * 50, b"c" * 20])
    seen: set[int] = set()
    for step in range(20):
        for row in corpus.batch(seed=1, step=step, batch_size=8, length=10).input_ids_BT.tolist():
            assert len(set(row)) == 1
            seen.add(row[0])
    assert bytes(sorted(seen)) == b"abc"


def test_every_start_is_drawn_first_and_last_included() -> None:
    corpus = Corpus([bytes([1, 2, 3, 4]), bytes([5, 6, 7])])
    batch = corpus.batch(seed=0, step=0, batch_size=200, length=2)
    assert {tuple(row) for row in batch.input_ids_BT.tolist()} == {(1, 2), (2, 3), (5, 6)}


def test_a_step_always_sees_the_same_batch_and_another_step_another() -> None:
    corpus = Corpus([TEXT * 4])

    def ids(seed: int, step: int) -> list[list[int]]:
        return corpus.batch(seed=seed, step=step, batch_size=4, length=16).input_ids_BT.tolist()

    assert ids(1, 7) == ids(1, 7)
    assert ids(1, 7) != ids(1, 8)
    assert ids(1, 7) != ids(2, 7)


def test_the_fingerprint_tells_documents_apart() -> None:
    prints = {
        Corpus(documents).fingerprint()
        for documents in ([b"ab", b"cd"], [b"abcd"], [b"cd", b"ab"], [b"abc", b"dd"])
    }
    assert len(prints) == 4
    assert Corpus([b"ab", b"cd"]).fingerprint() == Corpus([b"ab", b"cd"]).fingerprint()


def test_without_a_file_there_is_a_long_english_text() -> None:
    corpus = read_corpus([])
    assert corpus.num_bytes > 100_000


def test_files_are_documents(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"one")
    (tmp_path / "two").write_bytes(b"three")
    corpus = read_corpus([tmp_path / "one", tmp_path / "two"])
    assert (corpus.num_documents, corpus.num_bytes) == (2, 8)


@pytest.mark.parametrize("documents", [[], [b""], [b"a", b"b"]])
def test_nothing_to_learn_from_is_an_error_that_says_so(documents: list[bytes]) -> None:
    with pytest.raises(ValueError, match="give a longer text"):
        Corpus(documents)


@pytest.mark.parametrize("content", [b"", b"x"])
def test_a_file_without_a_prediction_is_named(tmp_path: Path, content: bytes) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"some text")
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=f"bad has {len(content)} bytes, expected the two"):
        read_corpus([good, bad])
