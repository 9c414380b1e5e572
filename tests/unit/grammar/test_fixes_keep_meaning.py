"""Fixes of `check --fix` leave the meaning that the file has for its writer, or are not offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.commands.check import run
from moec.grammar.load import load_file, load_text

TEXT = """\
model "m" {
  vocab = 64; dim = 32; depth = 1
  layers {
    attention = mha(heads = 4)
    moe { experts = 4 * gelu(32); gate = topk(2) }
  }
}
"""


def mended(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "m.moe"
    file.write_text(text)
    run([file], {}, fix=True)
    return file


@pytest.mark.parametrize("comment", ["/* x */", "/* a\n b */", "/**/", "/* # */"])
@pytest.mark.parametrize(
    "place", ["dim =@ 32", "dim@ = 32", "gate = @topk(2)", "heads@ =@ 4", "dim = 32@", "@moe {", "4 @* gelu"]
)
def test_a_comment_inside_of_a_statement_leaves_it(tmp_path: Path, comment: str, place: str):
    assert place.replace("@", "") in TEXT
    file = mended(tmp_path, TEXT.replace(place.replace("@", ""), place.replace("@", comment)))
    assert load_file(file).spec == load_text(TEXT).spec
    assert all(letter in file.read_text() for letter in "x" * ("x" in comment) + "ab" * ("a" in comment))


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("gelu(32)", "gelu_pytorch_tanh(32)"),  # another function than the exact one
        ("gelu(32)", "gelu_new(32)"),
        ("topk(2)", "top2"),  # with weights divided by their sum, or without
        ("gate = topk(2)", "gate = topk(2); shared_expert_intermediate_size = 64"),  # Qwen's has a gate
    ],
)
def test_a_word_of_other_mathematics_is_not_replaced(tmp_path: Path, ours: str, other: str):
    text = TEXT.replace(ours, other)
    assert mended(tmp_path, text).read_text() == text


def test_adam_is_not_replaced_by_another_optimizer(tmp_path: Path):
    text = TEXT + "train { batch = 1; sequence = 8; optimizer = adam(lr = 1e-3) }\n"
    assert mended(tmp_path, text).read_text() == text


def test_noisy_top_k_keeps_its_noise(tmp_path: Path):
    assert "gate = noisy_topk(2)" in mended(tmp_path, TEXT.replace("topk(2)", "noisy_top_k(2)")).read_text()
