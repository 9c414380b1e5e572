"""Warnings about ranks: each is given exactly where another number of ranks changes numbers."""

from __future__ import annotations

import torch
from support.plans import FOUR, moe_text
from support.tables import each_row

from moec.grammar import load_text
from moec.runtime.host.reference import reference

DEPENDENT = {
    "places": {"gate": "topk(2)", "balance": "[]", "beside": "capacity = factor(1.0); group = rank"},
    "dynamic places": {"gate": "topk(2)", "balance": "[]", "beside": "capacity = dynamic(max = 1.0); group = rank"},
    "switch_loss": {"gate": "topk(2)", "balance": "[switch_loss(0.1)]", "beside": "group = rank"},
    "gshard_loss": {"gate": "topk(2)", "balance": "[gshard_loss(0.1)]", "beside": "group = rank"},
    "importance_loss": {"gate": "topk(2)", "balance": "[importance_loss(0.1)]", "beside": "group = rank"},
    "device_loss": {"gate": "topk(2)", "balance": "[device_loss(0.1, groups = 4)]", "beside": "group = rank"},
    "expert_choice": {"gate": "expert_choice(1)", "balance": "[]", "beside": "group = rank"},
    "topology": {"gate": "topology(2)", "balance": "[]", "levels": FOUR},
}
INDEPENDENT = {
    "dropless": {"gate": "topk(2)", "balance": "[]", "beside": "group = rank"},
    "no bound": {"gate": "topk(2)", "balance": "[]", "beside": "capacity = dynamic(); group = rank"},
    "places for all": {"gate": "topk(2)", "balance": "[]", "beside": "capacity = factor(4.0); group = rank"},
    "z_loss": {"gate": "topk(2)", "balance": "[z_loss(0.1)]", "beside": "group = rank"},
    "sequence_loss": {"gate": "topk(2)", "balance": "[sequence_loss(0.1)]", "beside": "group = rank"},
    "without weight": {"gate": "topk(2)", "balance": "[switch_loss(0)]", "beside": "group = rank"},
    "sequence": {"gate": "topk(2)", "balance": "[switch_loss(0.1)]", "beside": "capacity = factor(1.0)"},
    "topology without weight": {"gate": "topology(2, weight = 0)", "balance": "[]", "levels": FOUR},
}


def warned(text: str) -> bool:
    return "MOE0315" in {one.code for one in load_text(text).diagnostics}


def loss(text: str) -> float:
    """The loss of a global batch with the routing groups of the file's ranks, unsharded and in float64."""
    model = reference(load_text(text).unwrap(), seed=1, dtype=torch.float64)
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(2))
    return model(tokens, tokens).loss.item()


@each_row("name", [*DEPENDENT, *INDEPENDENT])
def test_a_warning_is_given_where_another_number_of_ranks_gives_another_loss(name: str) -> None:
    options = {**DEPENDENT, **INDEPENDENT}[name]
    over_four, over_one = moe_text(**options, ranks=4), moe_text(**{**options, "levels": ""}, ranks=1, ep=1)
    assert warned(over_four) == (name in DEPENDENT)
    assert (abs(loss(over_four) - loss(over_one)) > 1e-9) == (name in DEPENDENT)


def test_a_stated_cluster_of_one_data_parallel_rank_has_no_warning_and_an_open_number_of_ranks_has_one() -> None:
    options = DEPENDENT["switch_loss"]
    assert not warned(moe_text(**options, ranks=1, ep=1))
    assert not warned(moe_text(**options, ranks=4, tp=4))
    assert warned(moe_text(**options, ranks=4, tp=2))
    without = moe_text(**options, ep=None).split('cluster "here"')[0]
    assert warned(without)


@each_row(
    ("degrees", "spans"),
    [
        ("layers 0 { ep = 2 }", ["2"]),
        ("layers 0 { ep = 2; recompute = layer }", ["2"]),
        ("layers 0 { recompute = layer }", []),
        ("layers 0..1 { ep = 2 }", []),
        ("layers 0 { ep = 1 }; layers { ep = 2 }; layers [0] { ep = 4 }", ["1", "4"]),
    ],
)
def test_a_degree_over_dense_layers_alone_is_warned_of(degrees: str, spans: list[str]) -> None:
    found = load_text(moe_text(ep=None, recompute=degrees)).diagnostics
    pointed = [
        one.span.source.text[one.span.start : one.span.end] for one in found if one.code == "MOE0375" and one.span
    ]
    assert pointed == spans


def test_ep_of_a_model_without_experts_is_warned_of() -> None:
    layers = "layers { attention = mha(heads = 4); ffn = gelu(8) }"
    text = f'model "m" {{ vocab = 32; dim = 16; depth = 2; context = 8; {layers} }}\n'
    (found,) = load_text(text + "parallel { ep = 1 }").diagnostics
    assert (found.code, found.message) == ("MOE0375", "it concerns no layer: layers 0..1 have no experts")
