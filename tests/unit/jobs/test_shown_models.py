"""What `repr` shows of plans, models, layers and reports."""

import copy
from pathlib import Path

import torch
from torch import nn

import moec

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_plan_is_five_lines_with_its_parameters_degrees_and_memory() -> None:
    lines = repr(moec.compile(EXAMPLES / "mixtral_8x7b.moe")).splitlines()
    assert len(lines) == 5
    assert lines[0] == "model       mixtral_8x7b: 32 layers (32 MoE), dim 4096, bf16"
    assert "46.7 B, 12.9 B active per token" in lines[1]
    assert "32 × h100 (four_nodes)" in lines[2]
    assert "ep 8" in lines[3]
    assert "GB of 80 GB at the peak" in lines[4]


def test_a_plan_in_a_notebook_is_a_table_of_escaped_text() -> None:
    text = (EXAMPLES / "first.moe").read_text().replace('model "first"', 'model "<b>&"')
    table = moec.compile(text)._repr_html_()
    assert "&lt;b&gt;&amp;: 2 layers" in table
    assert "<b>" not in table
    assert table.count("<tr>") == 5


def test_a_model_shows_what_the_file_says_and_every_shape_equal_layers_once() -> None:
    shown = repr(moec.reference(EXAMPLES / "first.moe"))
    assert "(0-1): 2 x Layer(" in shown
    assert "attention = mha(heads = 4, rope = rope)" in shown
    assert "gate = topk(2, normalize = true)" in shown
    assert "(up): Parameters(weight: [4, 2, 128, 64] float32)" in shown
    assert "(embedding): Parameters(weight: [256, 64] float32)" in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_models_of_every_kind_can_be_shown() -> None:
    model = moec.reference(EXAMPLES / "first.moe")
    model.layers[0].requires_grad_(False)
    model.layers[1] = nn.Sequential(model.layers[1])
    shown = repr(copy.deepcopy(model))
    assert "(q): Parameters(weight: [4, 16, 64] float32, frozen)" in shown
    assert "(1): Sequential(" in shown
    assert "[4, 16, 64] float32" in repr(model.to("meta").layers[1])
    nn.utils.parametrize.register_parametrization(model.norm, "weight", nn.Identity())
    assert "Identity" in repr(model)


def test_a_layer_shows_its_mixture() -> None:
    shown = repr(moec.layer(EXAMPLES / "ffn.moe"))
    assert "experts = 8 * swiglu(128)" in shown
    assert "(gate): Parameters(weight: [8, 64] float32)" in shown
    with torch.device("meta"):
        assert "[8, 64] float32" in repr(moec.layer(EXAMPLES / "ffn.moe"))


def test_a_report_says_whether_the_plan_is_right_and_what_differs_most() -> None:
    shown = repr(moec.verify(moec.compile(EXAMPLES / "first.moe")))
    assert shown.startswith("<Report: the plan of 1 rank equals the unsharded model; largest difference ")
    assert " on rank 0>" in shown
