"""The examples' text: always the same split, and one clear error if there is nothing to train on."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import text
import torch
from text import TextError, even_windows, load_text, random_windows, split, unigram_entropy


def folder_of(tmp_path: Path, **sizes: int) -> Path:
    folder = tmp_path / "data"
    for name, size in sizes.items():
        file = folder / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name[:1].encode() * size)
    return folder


def test_the_standard_library_is_megabytes_and_split_the_same_every_time() -> None:
    first, second = load_text(None, 128), load_text(None, 128)
    assert len(first.train) > 2_000_000
    assert 0.02 < len(first.held_out) / len(first.train) < 0.06
    assert torch.equal(first.held_out, second.held_out)
    assert torch.equal(first.train, second.train)


def test_whole_files_are_held_out(tmp_path: Path) -> None:
    sizes = {f"{chr(97 + number)}file": 1000 for number in range(26)}
    loaded = load_text(str(folder_of(tmp_path, **sizes)), 16)
    assert not set(loaded.held_out.unique().tolist()) - {10} & set(loaded.train.tolist())


def test_one_file_is_split_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(97, 117)) * 100)
    loaded = load_text(str(file), 16)
    assert bytes(loaded.train.tolist()) + bytes(loaded.held_out.tolist()) == file.read_bytes()
    assert len(loaded.held_out) == 100


def test_where_the_folder_lies_does_not_matter(tmp_path: Path) -> None:
    one, other = folder_of(tmp_path / "1", a=900, b=800, c=99), folder_of(tmp_path / "2" / "deep", a=900, b=800, c=99)
    assert torch.equal(load_text(str(one), 4).held_out, load_text(str(other), 4).held_out)


def test_split_keeps_every_byte_and_never_holds_out_much() -> None:
    for sizes in ([1], [5, 5], [100] * 30, [10_000, 1, 1, 1], [3, 2_000, 40], [10**5, 10**3]):
        files = {str(number): bytes([number]) * size for number, size in enumerate(sizes)}
        train, held_out = (part.replace(b"\n", b"") for part in split(files))
        assert sorted(train + held_out) == sorted(b"".join(files.values()).replace(b"\n", b""))
        assert len(held_out) <= sum(sizes) * text.HELD_OUT


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "has 0 bytes of text"), (b"\0" * 10_000, "has 0 bytes of text"), (b"too short", "has 9 bytes of text")],
)
def test_too_little_text_says_how_much_is_needed(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(content)
    for path in (tmp_path / "file", tmp_path):
        with pytest.raises(TextError, match=f"{message}, and at least 340 are needed"):
            load_text(str(path), 16)


def test_just_enough_text_is_enough(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 340)
    assert len(load_text(str(tmp_path), 16).held_out) == 17


def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(TextError, match=r"cannot read /nowhere/at/all: No such file or directory"):
        load_text("/nowhere/at/all", 16)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(TextError, match="secret: Permission denied"):
        load_text(str(tmp_path), 16)


def test_hidden_files_and_what_exceeds_the_room_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_BYTES", 500)
    folder = folder_of(tmp_path, a=400, b=400, c=400)
    (folder / ".hidden").write_bytes(b"h" * 400)
    loaded = load_text(str(folder), 16)
    assert len(loaded.train) + len(loaded.held_out) == 500 + len(b"\n")
    assert ord("h") not in loaded.train.tolist()


def test_labels_are_the_bytes_that_follow() -> None:
    source = torch.arange(200, dtype=torch.uint8)
    tokens, labels = next(random_windows(source, batch=4, sequence=8, seed=0))
    assert tokens.shape == labels.shape == (4, 8)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, tokens + 1)


def test_even_windows_come_in_whole_batches_and_do_not_overlap() -> None:
    source = torch.arange(200, dtype=torch.uint8)
    seen = [labels for _, labels in even_windows(source, most=10, batch=4, sequence=16)]
    assert [len(labels) for labels in seen] == [4, 4]
    flat = torch.cat(seen).flatten()
    assert len(flat.unique()) == len(flat)


def test_a_short_text_still_gives_one_batch() -> None:
    (batch,) = even_windows(torch.arange(30, dtype=torch.uint8), most=10, batch=4, sequence=16)
    assert batch[0].shape == (4, 16)


def test_unigram_entropy() -> None:
    assert unigram_entropy(torch.tensor([[7, 7], [7, 7]])) == 0
    assert math.isclose(unigram_entropy(torch.tensor([1, 2, 3, 4])), 2)
