"""A key that a config leaves out means what transformers' class fills in: the same model, or the same diagnostic.

Older versions' spellings of keys read like the new ones.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import Any

import pytest
from huggingface.decoders import ROWS, config_of, rope
from huggingface.equal import LEAVE_OUT, TINY
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Model

Keys = dict[str, Any]
OTHER_WIDTHS: Keys = {"hidden_size": 48, "num_attention_heads": 6}
"""Six heads: a class's default number of key and value heads divides them not, or is another than theirs."""
SAME_WIDTHS = {"dbrx", "granitemoehybrid"}
UNLIKE = {("dbrx", "rope_parameters")}
"""transformers 5.23 reads no `rope_theta` from `attn_config`, where DBRX's own code and its configs have it."""


def whole(model_type: str, **changes: Any) -> Keys:
    """The usual config of a row with every key that the class writes, `dtype` aside."""
    values = {**TINY, **config_of(model_type), **changes}
    made = CONFIG_MAPPING[model_type](**{key: value for key, value in values.items() if value != LEAVE_OUT})
    return of_class(made)


def of_class(config: Any) -> Keys:
    values = json.loads(json.dumps(config.to_dict(), default=str))
    values.pop("dtype", None)
    return values


def read(config: Keys) -> Model | set[tuple[str, str]]:
    """The model, or the codes of what is wrong, each with its key."""
    try:
        return moec.from_hf(config).model
    except DiagnosticError as error:
        keys = (re.search(r"`([\w.]+)`", found.message or "") for found in error.diagnostics)
        return {(found.code, key[1] if key else "") for found, key in zip(error.diagnostics, keys, strict=True)}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_a_key_left_out_means_the_default_of_the_class(model_type: str) -> None:
    heads = config_of(model_type).get("num_key_value_heads", TINY["num_key_value_heads"])
    other = {**OTHER_WIDTHS, "num_key_value_heads": 6 if heads == TINY["num_attention_heads"] else 3}
    base = whole(model_type, **({} if model_type in SAME_WIDTHS else other))
    compared = 0
    for key in base.keys() - {"model_type"}:
        less = {each: value for each, value in base.items() if each != key}
        try:
            filled = of_class(CONFIG_MAPPING[model_type](**{k: v for k, v in less.items() if k != "model_type"}))
        except (ValueError, StrictDataclassError):
            continue  # the class has no model without this key
        ours = read(less)
        if isinstance(ours, set) and any(code == "MOE0902" for code, _ in ours):
            continue  # moec asks for the key
        if (model_type, key) not in UNLIKE:
            assert ours == read({**less, key: filled.get(key)}), f"{key}: by default {filled.get(key)}"
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen2", "qwen3"])
@pytest.mark.parametrize("first", [0, 2, 28])
def test_windows_without_layer_types_are_those_of_the_class(model_type: str, first: int) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": first}
    base = whole(model_type, **windows)
    less = {key: value for key, value in base.items() if key != "layer_types"}
    filled = of_class(CONFIG_MAPPING[model_type](**{k: v for k, v in less.items() if k != "model_type"}))
    assert read(less) == read({**less, "layer_types": filled["layer_types"]})


def test_null_is_false_as_in_the_class() -> None:
    config = whole("deepseek_v3")
    assert read({**config, "norm_topk_prob": None}) == read({**config, "norm_topk_prob": False})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_alpha_is_of_hunyuan_alone() -> None:
    parameters = rope(rope_type="dynamic", factor=2.0)["rope_parameters"]
    plain = read({**whole("mixtral"), "rope_parameters": parameters})
    assert read({**whole("mixtral"), "rope_parameters": {**parameters, "alpha": 100.0}}) == plain


OLD: dict[str, tuple[Keys, Keys]] = {
    "base of positions": ({"rope_theta": 123.0}, rope(rope_type="default", rope_theta=123.0)),
    "scaling": (
        {"rope_theta": 123.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        rope(rope_type="linear", factor=2.0, rope_theta=123.0),
    ),
    "scaling, both keys": (
        {**rope(rope_type="default", rope_theta=5.0), "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        rope(rope_type="linear", factor=2.0, rope_theta=1e6),
    ),
    "yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e6),
    ),
    "longrope": (
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
        rope(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, rope_theta=1e6),
    ),
    "number of experts": ({"num_local_experts": LEAVE_OUT, "num_experts": 6}, {}),
    "dtype": ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    "dtype with its module": ({"torch_dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
    "no scaling": ({"rope_scaling": None, "sliding_window": None}, {}),
}


@pytest.mark.parametrize("name", OLD)
def test_old_spellings_read_alike(name: str) -> None:
    old, new = OLD[name]
    base = {**TINY, **config_of("mixtral"), "model_type": "mixtral", "head_dim": 8, "rope_theta": 1e6}
    old_config, new_config = ({**deepcopy(base), **deepcopy(keys)} for keys in (old, new))
    new_config.pop("rope_theta")
    new_config.setdefault("rope_parameters", {"rope_theta": old_config.get("rope_theta", 1e6)})
    old_config = {key: value for key, value in old_config.items() if value != LEAVE_OUT}
    assert moec.from_hf(old_config).model == moec.from_hf(new_config).model
