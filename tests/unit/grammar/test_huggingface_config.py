"""What reading a config.json says of keys that no reader asks for, and of values that are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.tables import each_row

from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.read import read_config
from moec.grammar.source import Source

CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 32,
}
LINEAR = {"type": "linear", "factor": 2.0}


def notes(**changes: Any) -> list[str]:
    return [note.message for note in read_config({**CONFIG, **changes}).notes]


def test_keys_that_nobody_asks_for_are_warned_of_also_inside_of_others() -> None:
    assert notes(rope_scaling=LINEAR) == []
    said = notes(rope_scaling={**LINEAR, "high_freq": 3}, new_norm="l2")
    assert said == [f"`{key}` is not known here and has no effect" for key in ("new_norm", "rope_scaling.high_freq")]


def test_a_nested_key_is_found_where_it_stands_and_not_at_an_outer_one_of_its_name() -> None:
    text = '{\n "factor": 3,\n "rope_scaling": {\n  "factor": 0.5\n }\n}'
    config = Config(json.loads(text), Source("config.json", text))
    assert [each.span("factor").line for each in (config, config.nested("rope_scaling"))] == [2, 4]


def test_the_context_that_was_trained_may_stand_beside_the_parameters() -> None:
    longrope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for place in ({"original_max_position_embeddings": 8}, {}):
        spec = read_config({**CONFIG, "rope_scaling": longrope, **place}).spec
        scaling = spec.model.layers[0].attention.rope.scaling
        assert scaling.original == (8 if place else 32)


@each_row("value", [None, False, 0, 0.0, "", [], {}, float("nan")])
def test_unknown_keys_that_switch_nothing_on_are_not_warned_of(value: object) -> None:
    assert notes(new_norm=value, rope_scaling={**LINEAR, "new": value}) == []


def test_rotary_parameters_of_layers_that_the_model_does_not_have_are_no_unknown_keys() -> None:
    ropes = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    mellum = {
        "model_type": "mellum", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "rope_parameters": ropes,
    }  # fmt: skip
    assert notes(**mellum) == []


@each_row(
    ("value", "shown"),
    [("five", '"five"'), (True, "true"), ([1, "a", None], '[1, "a", null]'), ({"a": False}, '{"a": false}')],
)
def test_wrong_values_are_shown_as_json_writes_them(value: object, shown: str) -> None:
    with pytest.raises(DiagnosticError) as raised:
        read_config({**CONFIG, "vocab_size": value})
    assert [each.message for each in raised.value.diagnostics] == [
        f"`vocab_size` is {shown}, and must be a whole number, at least 1"
    ]
