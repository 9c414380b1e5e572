"""Fixes of `check --fix` leave the meaning that the file has for its writer, or are not offered."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tables import each_row

from moec.commands.check import run
from moec.grammar.diagnostics import DiagnosticError
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


@each_row("comment", ["/* x */", "/* a\n b */", "/**/", "/* # */"])
@each_row("place", ["dim =@ 32", "dim@ = 32", "gate = @topk(2)", "heads@ =@ 4", "dim = 32@", "@moe {", "4 @* gelu"])
def test_a_comment_inside_of_a_statement_leaves_it(tmp_path: Path, comment: str, place: str):
    assert place.replace("@", "") in TEXT
    file = mended(tmp_path, TEXT.replace(place.replace("@", ""), place.replace("@", comment)))
    assert load_file(file).spec == load_text(TEXT).spec
    assert all(letter in file.read_text() for letter in "x" * ("x" in comment) + "ab" * ("a" in comment))


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


@each_row(
    ("written", "meant"),
    [
        ("layers :2", "layers 0..1"),
        ("layers 1::2", "layers 1..3 step 2"),
        ("layers 1:4", "layers 1..3"),
        ("layers 0:4:2", "layers 0..3 step 2"),
        ("layers 0-2", "layers 0..2"),
        ("layers 0, 2", "layers [0, 2]"),
        ("layers 1..", "layers 1..3"),
        ("layers ..2", "layers 0..2"),
        ("layers 0..3..2", "layers 0..3 step 2"),
        ("layers 0...3", "layers 0..3"),
        ("layers -1", "layers 3"),
        ("layers *", "layers"),
    ],
)
def test_layers_are_those_that_were_chosen_in_another_way(tmp_path: Path, written: str, meant: str):
    text = 'model "m" {{ vocab = 64; dim = 32; depth = 4; context = 8; layers {{ ffn = relu(8) }}'
    text += "\n {} {{ ffn = gelu(8) }} }}"
    assert load_file(mended(tmp_path, text.format(written))).spec == load_text(text.format(meant)).spec


def test_layers_that_nobody_can_count_are_not_replaced(tmp_path: Path):
    text = 'let deep = 4; model "m" { vocab = 64; dim = 32; depth = deep; context = 8\n layers -1 { ffn = gelu(8) } }'
    for depth in ("deep", "4 * 2", "deep * 2"):
        assert mended(tmp_path, text.replace("= deep;", f"= {depth};")).read_text() == text.replace(
            "= deep;", f"= {depth};"
        )


@each_row("selector", ["2:", "2: ", "0, 1 1", "0, 1 2"])
def test_layers_that_may_be_others_are_not_replaced(tmp_path: Path, selector: str):
    text = TEXT.replace("depth = 1", "depth = 4").replace("layers {", f"layers {selector} {{")
    assert f"layers {selector} {{" in mended(tmp_path, text).read_text()


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
    ("written", "meant"),
    [
        ("heads = {4}", "heads = 4"),
        ("gate = {type: topk, k: 2}", "gate = topk(2)"),
        ("gate = {'type': 'topk', 'k': 2}", "gate = topk(2)"),
        ("balance = {switch_loss(0.1), z_loss(0.1)}", "balance = [switch_loss(0.1), z_loss(0.1)]"),
        ("balance = {switch_loss(0.1);\n z_loss(0.1)}", "balance = [switch_loss(0.1), z_loss(0.1)]"),
    ],
)
def test_values_in_braces_are_read(tmp_path: Path, written: str, meant: str):
    word = written.partition(" = ")[0]
    before = {"heads": "heads = 4", "gate": "gate = topk(2)", "balance": "gate = topk(2)"}[word]
    more = "gate = topk(2); " if word == "balance" else ""
    text = TEXT.replace("depth = 1", "depth = 1; context = 8")
    file = mended(tmp_path, text.replace(before, more + written))
    assert load_file(file).spec == load_text(text.replace(before, more + meant)).spec


def test_settings_without_a_word_are_not_replaced(tmp_path: Path):
    text = TEXT.replace("gate = topk(2)", "gate = {k: 2, scale: 1}")
    assert mended(tmp_path, text).read_text() == text


def test_a_model_that_is_called_is_the_block(tmp_path: Path):
    called = 'model("m", vocab=64, dim=32, depth=1, context=8,\n layers(ffn=gelu(8), attention=mha(heads=4)))'
    block = 'model "m" { vocab=64; dim=32; depth=1; context=8; layers { ffn=gelu(8); attention=mha(heads=4) } }'
    assert load_file(mended(tmp_path, called)).spec == load_text(block).spec


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
