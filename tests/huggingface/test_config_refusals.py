"""What a config cannot mean: a diagnostic that names the key, for every family, never a traceback and never silence."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from huggingface.decoders import ROWS, config_of, usual
from huggingface.equal import LEAVE_OUT, refusal
from support.tables import each_row

import moec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.around import AROUND
from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.families import BY_TYPE
from moec.grammar.huggingface.read import INERT, read_config

Keys = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
WRONG: tuple[Any, ...] = (None, "x", -1, 0, 1.5, math.nan, [], {}, True)


def asked(model_type: str) -> set[str]:
    """The keys for which the family's reader asks."""
    config = Config(usual(model_type))
    BY_TYPE[model_type].model_of(config)
    return config.asked


def codes_of(config: Keys) -> set[str]:
    """The codes of what is wrong."""
    try:
        moec.from_hf(config)
    except DiagnosticError as error:
        return {found.code for found in error.diagnostics}
    return set()


# ---- anything at all -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_a_wrong_value_of_any_key_is_a_model_or_a_diagnostic(model_type: str) -> None:
    config = usual(model_type)
    places = [(config, key) for key in asked(model_type)]
    for inner in [value for value in config.values() if isinstance(value, dict)]:
        places += [(inner, key) for key in inner]
        places += [(deeper, key) for deeper in inner.values() if isinstance(deeper, dict) for key in deeper]
    refused = 0
    for where, key in places:
        was = where.get(key, LEAVE_OUT)
        for value in WRONG:
            where[key] = value
            codes = codes_of(config)
            assert codes <= {"MOE0901", "MOE0902", "MOE0903"}, (key, value)
            refused += bool(codes)
        where.pop(key) if was == LEAVE_OUT else where.update({key: was})
    assert refused > len(places)


@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_every_key_that_is_missing_is_reported_at_once(model_type: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        moec.from_hf({"model_type": model_type})
    missing = [found.message for found in caught.value.diagnostics if found.code == "MOE0902"]
    assert len(missing) == len(set(missing)) >= 3, missing


# ---- what has no word ------------------------------------------------------------------------------

UNSPEAKABLE: dict[str, tuple[Keys, str]] = {
    "afmoe": ({"score_func": "softmax"}, "score_func"),
    "aria_text": ({"hidden_act": "relu"}, "hidden_act"),
    "cohere2_moe": ({"num_shared_experts": 1}, "shared_expert_combination_strategy"),
    "dbrx": (
        {"ffn_config": {**ROWS["dbrx"][0]["ffn_config"], "moe_normalize_expert_weights": 2.0}},
        "ffn_config.moe_normalize_expert_weights",
    ),
    "deepseek_v2": ({"norm_topk_prob": True}, "norm_topk_prob"),
    "deepseek_v3": ({"scoring_func": "softmax"}, "scoring_func"),
    "dots1": ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    "ernie4_5_moe": ({"moe_norm_min": 0.1}, "moe_norm_min"),
    "exaone_moe": ({"topk_method": "greedy"}, "topk_method"),
    "flex_olmo": ({"hidden_act": "gelu_new"}, "hidden_act"),
    "flint": ({"layer_types": ["linear_attention", FULL, SLIDING]}, "layer_types"),
    "glm4_moe": ({"n_group": 3, "topk_group": 1}, "n_group"),
    "glm4_moe_lite": ({"mlp_layer_types": ["hash_moe"] * 3}, "mlp_layer_types"),
    "gpt_oss": ({"hidden_act": "gelu"}, "hidden_act"),
    "granitemoe": ({"attention_multiplier": -1.0}, "attention_multiplier"),
    "granitemoe_swa": ({"logits_scaling": 0}, "logits_scaling"),
    "granitemoehybrid": ({"layer_types": ["mamba", FULL, FULL]}, "layer_types"),
    "granitemoeshared": ({"embedding_multiplier": 0}, "embedding_multiplier"),
    "hunyuan_v1_moe": ({"use_cla": True}, "use_cla"),
    "hy_v3": ({"router_scaling_factor": -1.0}, "router_scaling_factor"),
    "llama": ({"hidden_act": "gelu_new"}, "hidden_act"),
    "mistral": ({"mlp_bias": True}, "mlp_bias"),
    "qwen2": ({"hidden_act": "relu"}, "hidden_act"),
    "qwen3": ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "layer_types"),
    "jamba": ({"attn_layer_period": 2}, "attn_layer_period"),
    "lfm2_moe": ({"layer_types": ["conv", FULL, FULL]}, "layer_types"),
    "mellum": ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
    "mimo_v2_flash": ({"attention_value_scale": 0.707}, "attention_value_scale"),
    "minimax_m2": ({"use_routing_bias": False}, "use_routing_bias"),
    "mistral4": ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
    "mixtral": ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type"),
    "olmoe": ({"rms_norm_eps": 2.0}, "rms_norm_eps"),
    "phimoe": ({"num_experts_per_tok": 3}, "num_experts_per_tok"),
    "qwen2_moe": ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "rope_parameters.factor"),
    "qwen3_moe": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "solar_open": ({"use_qk_norm": True}, "use_qk_norm"),
}


def test_every_family_has_something_that_it_cannot_say() -> None:
    assert UNSPEAKABLE.keys() == ROWS.keys()


@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_what_moec_cannot_express_is_refused_with_its_key(model_type: str) -> None:
    changes, key = UNSPEAKABLE[model_type]
    said = refusal(model_type, **{**config_of(model_type), **changes})
    assert f"MOE0903: `{key}` is " in said, said


# ---- what is not asked for -------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_a_key_that_nobody_asks_for_is_a_warning(model_type: str) -> None:
    notes = read_config(usual(model_type, value_residual=0.25)).notes
    assert [note.code for note in notes if "`value_residual`" in (note.message or "")] == ["MOE0904"]


def test_so_is_one_of_the_positions_and_of_other_parts() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "attention_factor": 3.0}
    (note,) = read_config(usual("mixtral", rope_parameters=rope)).notes
    assert (note.code, note.message) == (
        "MOE0904",
        "`rope_parameters.attention_factor` is not known here and has no effect",
    )
    parts = {**config_of("dbrx")["attn_config"], "alibi": True}
    (note,) = read_config(usual("dbrx", attn_config=parts)).notes
    assert note.message == "`attn_config.alibi` is not known here and has no effect"


@each_row(
    ("model_type", "changes", "said"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 4}, "switch_loss(0.004, over = model)"),
        ("mixtral", {"num_experts_per_tok": 3}, "switch_loss(0.003, over = model)"),
        ("olmoe", {"num_hidden_layers": 1}, "over the tokens of the layer"),
        ("minimax_m2", {}, "none is over this gate's logits"),
        ("qwen3_moe", {"router_aux_loss_coef": 0.0}, ""),
        ("qwen3_moe", {"output_router_logits": False}, ""),
    ],
)
def test_a_balance_loss_is_a_warning_with_the_line_that_is_equal(
    model_type: str, changes: dict[str, Any], said: str
) -> None:
    on = {"output_router_logits": True, "router_aux_loss_coef": 0.001, **changes}
    notes = [note.message for note in read_config(usual(model_type, **on)).notes]
    assert len(notes) == bool(said)
    assert all(said in note and "`router_aux_loss_coef`" in note for note in notes)


@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_the_usual_config_has_no_warning(model_type: str) -> None:
    assert read_config(usual(model_type)).notes == ()


def test_no_reader_asks_for_a_key_that_is_known_to_mean_nothing() -> None:
    """A key that decides the model in one family must not be dropped in silence in the others."""
    both = {key for model_type in ROWS for key in asked(model_type)} & INERT
    assert both <= {"model_type", "dtype", "torch_dtype"}


# ---- nested values, code, types --------------------------------------------------------------------

LONGROPE: Keys = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 8,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": []}, "`rope_parameters` is [], and must be an object"),
        ({"rope_parameters": "linear"}, '`rope_parameters` is "linear", and must be an object'),
        ({"rope_scaling": [1]}, "`rope_scaling` is [1], and must be an object"),
        ({"rope_parameters": {"rope_type": 3}}, "`rope_parameters.rope_type` is 3, and must be a text"),
        ({"rope_parameters": {"rope_type": "linear", "factor": math.nan}}, "`rope_parameters.factor` is NaN"),
        ({"rope_parameters": {"rope_type": "linear"}}, "`rope_parameters.factor` is missing"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "`rope_parameters.rope_theta` is -1.0"),
        ({"rope_parameters": {**LONGROPE, "factor": 3.0}}, "`rope_parameters.factor` is 3.0"),
        ({"rope_parameters": {**LONGROPE, "attention_factor": 3.0}}, "`rope_parameters.attention_factor` is 3.0"),
        ({"num_local_experts": 1e400}, "`num_local_experts` is Infinity"),
        ({"num_local_experts": True}, "`num_local_experts` is true"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000"),
        ({"num_experts_per_tok": 7}, "MOE0304"),
        ({"dtype": "float8_e4m3fn"}, "`dtype` is "),
    ],
)
def test_wrong_values_are_named(changes: Keys, said: str) -> None:
    assert said in refusal("mixtral", **{**config_of("mixtral"), **changes})


def test_wrong_kinds_of_the_parts_of_a_config_are_named() -> None:
    assert "`attn_config` is 3, and must be an object" in refusal("dbrx", **{**config_of("dbrx"), "attn_config": 3})
    both = refusal("dbrx", **{**config_of("dbrx"), "ffn_config": []})
    assert "`ffn_config` is [], and must be an object" in both


@pytest.mark.parametrize("model_type", [None, 3, "", "gpt2", "Mixtral", ["mixtral"]])
def test_a_type_that_is_none_of_a_family_is_a_diagnostic(model_type: Any) -> None:
    with pytest.raises(DiagnosticError) as caught:
        moec.from_hf({**usual("mixtral"), "model_type": model_type})
    assert caught.value.diagnostics[0].code in ("MOE0901", "MOE0902")


def test_code_of_a_folder_is_named_and_not_run(tmp_path: Any) -> None:
    (tmp_path / "modeling_mixtral.py").write_text("raise SystemExit('it was run')")
    config = {**usual("mixtral"), "auto_map": {"AutoModelForCausalLM": "modeling_mixtral.Mixtral"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"`auto_map` is .* is not run"):
        assert moec.from_hf(tmp_path).model.name == "mixtral"
    with pytest.raises(DiagnosticError, match=r"its own code .* is never run"):
        moec.from_hf({**config, "model_type": "mixtral_of_mine"})


def test_a_key_that_transformers_ignores_is_refused_where_it_says_something() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert "`rope_scaling` is " in refusal("cohere2_moe", **config_of("cohere2_moe"), rope_scaling=scaling)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", sorted(AROUND))
def test_so_is_a_wrong_decoder_inside_of_a_model_of_images(model_type: str) -> None:
    for value in (*WRONG, ["aria_text"], {"model_type": ["aria_text"]}, {"model_type": None}, {"rope_parameters": 3}):
        codes = codes_of({"model_type": model_type, "text_config": value, "vision_config": value})
        assert codes <= {"MOE0901", "MOE0902", "MOE0903"}
        assert codes


# ---- what is imported in part ----------------------------------------------------------------------


def test_mistral4_turns_a_part_of_the_width_that_its_config_says() -> None:
    assert "MOE0903: `head_dim` is 8" in refusal("mistral4", **{**config_of("mistral4"), "head_dim": 8})


def test_mistral4_is_imported_for_the_context_that_was_trained() -> None:
    rope = {**config_of("mistral4")["rope_parameters"], "llama_4_scaling_beta": 0.1}
    with pytest.warns(UserWarning, match="from which on `llama_4_scaling_beta` scales queries"):
        spec = moec.from_hf(usual("mistral4", rope_parameters=rope))
    assert spec.model.context == rope["original_max_position_embeddings"] == 32
