"""Fixes of `check --fix` leave the meaning that the file has for its writer, or are not offered."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tables import each_row

from moec.commands.check import run
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.load import load_text

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


@each_row(
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


@each_row("selector", ["2:", "0:2", ":2", "-1", "0-3", "0, 1", "0..", "*", "0...3"])
def test_layers_that_are_chosen_as_elsewhere_are_not_replaced_and_the_forms_are_listed(tmp_path: Path, selector: str):
    text = TEXT.replace("depth = 1", "depth = 4").replace("layers {", f"layers {selector} {{")
    assert mended(tmp_path, text).read_text() == text
    assert "write `layers 3`, `layers 0..3` with the last" in load_text(text).diagnostics[0].help


@each_row("division", ["4096 // 64", "4096 // 64; depth = 2", "4096 // (2 * 32)", "wide // parts"])
def test_a_division_is_not_made_a_comment(tmp_path: Path, division: str):
    text = TEXT.replace("dim = 32; depth = 1", f"dim = {division}")
    text = f"let wide = 4096\nlet parts = 64\n{text}"
    assert division in mended(tmp_path, text).read_text()


@each_row("word", ["sgdm", "sgdw", "adamp", "adams", "nadamw", "muonw"])
def test_an_optimizer_of_another_library_is_not_replaced(tmp_path: Path, word: str):
    text = TEXT + f"train {{ batch = 1; sequence = 8; optimizer = {word}(lr = 1e-3) }}\n"
    assert mended(tmp_path, text).read_text() == text


@each_row(
    ("right", "wrong"),
    [
        ("parallel { microbatches = 2 }", "parallel { microbatch_size = 2 }"),
        ("parallel { microbatches = 2 }", "parallel { micro_batch = 2 }"),
        ("train { batch = 8", "train { ubatch = 8"),
        ("train { batch = 8", "train { mbatch = 8"),
        ("lr = lr_min", "lr = lr_mix"),
        ("4 * gelu(32)", "4 * gelu(32); capacity = 64"),
        ("topk(2)", "topk(2, bias = 1)"),
        ("topk(2)", "topk(2, bias = true)"),
        ("topk(2)", "topk(2); balance = [batch_loss(0.01)]"),
        ("topk(2)", "topk(2); balance = [aux_loss(0.01)]"),
        ("topk(2)", "topk(2); balance = [load_balance_loss(0.01)]"),
        ("topk(2)", "topk(2); balance = aux_loss(0.01)"),
    ],
)
def test_a_word_or_number_of_another_meaning_is_not_replaced(tmp_path: Path, right: str, wrong: str):
    text = "let lr_min = 1e-3\nlet lr_max = 1e-2\n" + TEXT
    text += "train { batch = 8; sequence = 8; optimizer = sgd(lr = lr_min) }\nparallel { microbatches = 2 }\n"
    text = text.replace(right, wrong)
    assert wrong in mended(tmp_path, text).read_text()


@each_row(
    ("written", "meant"),
    [
        ("400Gb/s", "50GB/s"),
        ("3600Gbps", "450GB/s"),
        ("1e2Gbit/s", "12.5GB/s"),
        ("900GBps", "900GB/s"),
        ("400Gib/s", "50GiB/s"),
        ("0.45PB/s", "450TB/s"),
        ("1TiB/s", "1024GiB/s"),
        *((f"400{unit}", f"400{unit}") for unit in ("Gb", "gbps", "gb/s", "mb/s", "Gbs/s", "GT/s", "G/s")),
    ],
)
def test_bits_become_an_eighth_of_as_many_bytes(tmp_path: Path, written: str, meant: str):
    text = TEXT + 'cluster "c" { device = h100; level "gpu" { size = 8; bandwidth = {} } }\n'
    assert mended(tmp_path, text.replace("{}", written)).read_text() == text.replace("{}", meant)


@each_row(
    ("right", "wrong"),
    [
        ("gate = topk(2)", "gate = topk(2); balance = [cv_loss(0.1)]"),
        ("gate = topk(2)", "gate = topk(2); balance = [c_loss(0.1)]"),
        ("4 * gelu(32)", "4 * selu(32)"),
        ("mha(heads = 4)", "mqa(heads = 4)"),
        ("depth = 1", "depth = 1; dtype = tf32"),
    ],
)
def test_a_word_that_is_near_but_means_something_else_is_not_replaced(tmp_path: Path, right: str, wrong: str):
    text = TEXT.replace(right, wrong)
    assert mended(tmp_path, text).read_text() == text


def test_a_device_with_another_number_is_not_replaced(tmp_path: Path):
    text = TEXT + 'cluster "c" { device = h20; level "gpu" { size = 8; bandwidth = 400GB/s } }\n'
    assert mended(tmp_path, text).read_text() == text


@each_row(("hidden", "left"), [("\x1b[31m", "[31m"), ("\u202e", ""), ("\t", " "), ("\u200b", "")])
def test_characters_that_do_not_print_stand_in_no_text(tmp_path: Path, hidden: str, left: str):
    with pytest.raises(DiagnosticError, match="MOE0102"):
        load_text(TEXT.replace('"m"', f'"größe{hidden}m"')).unwrap()
    assert f'"größe{left}m"' in mended(tmp_path, TEXT.replace('"m"', f'"größe{hidden}m"')).read_text()
