"""Keys present, left out, null and under other names: moec's model is that of transformers' class, or a refusal.

The slow tests try every key of every family; the others have what was wrong once.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import transformers
from huggingface.decoders import ROWS, usual
from huggingface.differential import Keys, Verdicts, cases_of, config_of_class, read
from huggingface.equal import LEAVE_OUT, class_of
from huggingface.more_published import EVERY, shrunk
from huggingface.test_decoders_of_images import MODELS, TEXT
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moec.grammar.huggingface.families import BY_TYPE

FULL, SLIDING = "full_attention", "sliding_attention"
NO_ROPE: Keys = {"rope_parameters": LEAVE_OUT}
WIDE: Keys = {"head_dim": 32, "v_head_dim": 32}
FOUND: list[tuple[str, str, Keys]] = [
    ("the class's yarn, with a base", "gpt_oss", {**NO_ROPE, "rope_theta": 77.0}),
    ("the class's yarn, null scaling", "gpt_oss", {**NO_ROPE, "rope_theta": 77.0, "rope_scaling": None}),
    ("the class's yarn, empty scaling", "gpt_oss", {**NO_ROPE, "rope_scaling": {}}),
    ("the class's yarn, another context", "mistral4", {**NO_ROPE, "original_max_position_embeddings": 32}),
    ("an alias alone", "ernie4_5_moe", {"moe_k": LEAVE_OUT, "num_experts_per_tok": 3}),
    ("an alias alone", "hunyuan_v1_moe", {"moe_topk": LEAVE_OUT, "num_experts_per_tok": 3}),
    ("null of two kinds", "mellum", {"rope_parameters": None}),
    ("a part that the class ignores", "mimo_v2_flash", {"rope_parameters": None, "partial_rotary_factor": 0.5}),
    ("a base that the class ignores", "mimo_v2_flash", {**NO_ROPE, "rope_theta": 7.0, **WIDE}),
    ("a window as long as the context", "flint", {"sliding_window": 64}),
    ("a window as long as the context", "cohere2_moe", {"sliding_window": 64}),
    ("a window as long as the context", "afmoe", {"sliding_window": 64}),
    ("a window as long as the context", "exaone_moe", {"sliding_window": 64}),
    ("layers that the class ignores", "dots1", {"mlp_layer_types": ["sparse", "sparse", "dense"]}),
    ("no shared experts", "deepseek_v2", {"n_shared_experts": 0}),
    ("no shared experts", "granitemoehybrid", {"shared_intermediate_size": 0}),
    ("dense layers alone", "deepseek_v3", {"first_k_dense_replace": 3}),
    ("dense layers alone", "ernie4_5_moe", {"moe_layer_start_index": 3, "moe_layer_end_index": 3}),
    ("the name of the method", "dots1", {"scoring_func": "noaux_tc"}),
]  # fmt: skip
REFUSED: list[tuple[str, str, Keys]] = [
    ("two values of one key", "ernie4_5_moe", {"moe_k": 2, "num_experts_per_tok": 3}),
    ("null shared experts", "deepseek_v2", {"n_shared_experts": None}),
    ("a key of the original code", "gpt_oss", {"experts_per_token": 3}),
    ("queries of rank 0", "deepseek_v3", {"q_lora_rank": 0}),
]


def changed(model_type: str, keys: Keys) -> Keys:
    values = {**usual(model_type), **deepcopy(keys)}
    return {key: value for key, value in values.items() if value != LEAVE_OUT}


def test_what_was_wrong_is_equal() -> None:
    tried = Verdicts()
    for name, model_type, keys in FOUND:
        tried.add(name, changed(model_type, keys), class_of(model_type))
    assert (tried.wrong, tried.equal) == ([], len(FOUND))


@pytest.mark.parametrize(("model_type", "keys"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_no_reading_is_right_of_is_refused(model_type: str, keys: Keys) -> None:
    assert read(changed(model_type, keys)) is None


def test_aliases_are_those_of_the_classes() -> None:
    for model_type in ROWS:
        assert dict(BY_TYPE[model_type].aliases) == CONFIG_MAPPING[model_type].attribute_map, model_type


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_every_key_of_a_family_is_equal_or_refused(model_type: str) -> None:
    tried = Verdicts()
    for name, config in cases_of(model_type):
        tried.add(name, config, class_of(model_type))
    assert not tried.wrong, "\n".join(tried.wrong)
    assert tried.equal > 150


# ---- decoders inside of other models ---------------------------------------------------------------

TIED: tuple[Any, ...] = (LEAVE_OUT, True, False)


def test_embeddings_are_tied_where_transformers_ties_them() -> None:
    """By the key of the whole config, and of GLM-4.5V also by that of its `text_config` alone."""
    tried = Verdicts()
    for model_type, (kind, decoder, tower) in MODELS.items():
        for outer in TIED:
            for inner in TIED:
                inside = {**TEXT, **decoder, "tie_word_embeddings": inner}
                config = {
                    "model_type": model_type, "vision_config": tower, "tie_word_embeddings": outer,
                    "text_config": {key: value for key, value in inside.items() if value != LEAVE_OUT},
                }  # fmt: skip
                less = {key: value for key, value in config.items() if value != LEAVE_OUT}
                tried.add(f"{outer} outside, {inner} inside", less, getattr(transformers, kind))
    assert not tried.wrong, "\n".join(tried.wrong)
    assert tried.equal == len(MODELS) * len(TIED) ** 2


# ---- configs as they are published -----------------------------------------------------------------


def test_published_configs_read_as_the_class_writes_them() -> None:
    """At their own size, for which there are no weights here."""
    for name, config in EVERY.items():
        ours, theirs = read(config), config_of_class(config)
        assert ours is not None, name
        again = read(json.loads(json.dumps(theirs.to_dict(), default=str)))
        assert again is not None, name
        assert ours.model == again.model, name


@pytest.mark.slow
def test_published_configs_made_small_are_equal() -> None:
    tried = Verdicts()
    for name, config in EVERY.items():
        tried.add(name, shrunk(config), class_of(config["model_type"]))
    assert not tried.wrong, "\n".join(tried.wrong)
    assert tried.equal == len(EVERY)
