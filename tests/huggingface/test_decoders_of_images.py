"""Models of images and text: given tokens, moec's decoder computes what the whole model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface.decoders import LATENT, MISTRAL4_ROPE, SCORED, config_of
from huggingface.equal import LEAVE_OUT, TINY, VOCAB, text
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.around import AROUND
from moec.runtime.huggingface.checkpoints import export_weights, import_weights

Keys = dict[str, Any]
TEXT: Keys = {key: value for key, value in TINY.items() if not key.endswith("_implementation")}
EXPERTS: Keys = {"intermediate_size": 24, "moe_intermediate_size": 20, "num_experts_per_tok": 2, "head_dim": 8}
ROPE: Keys = {"rope_type": "default", "rope_theta": 123.0}
TOWER: Keys = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 2}
LAYERS: Keys = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2}
BLOCKS: Keys = {**TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 32}

MODELS: dict[str, tuple[str, Keys, Keys]] = {
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {**EXPERTS, "num_experts": 6, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
        {**BLOCKS, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {**SCORED, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
        {**BLOCKS, "image_size": 8},
    ),
    "kimi_k25": (
        "Kimi_K25ForConditionalGeneration",
        {**LATENT, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
        LAYERS,
    ),
    "aria": (
        "AriaForConditionalGeneration",
        config_of("aria_text"),
        {**LAYERS, "image_size": 8, "model_type": "idefics3_vision"},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {**LATENT, "model_type": "mistral4", "n_group": 4, "topk_group": 2, "rope_parameters": MISTRAL4_ROPE},
        {**LAYERS, "image_size": 8, "head_dim": 8, "model_type": "pixtral"},
    ),
}
"""Model type → class, keys of the decoder, keys of the tower."""


def made(model_type: str, **keys: Any) -> PreTrainedModel:
    """The whole model with random weights, in evaluation."""
    name, decoder, tower = MODELS[model_type]
    inside = {key: value for key, value in {**TEXT, **decoder}.items() if value != LEAVE_OUT}
    config = CONFIG_MAPPING[model_type](text_config=inside, vision_config=tower, **keys)
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=text()).logits if isinstance(model, PreTrainedModel) else model(text()).logits


def read(config: Any) -> Any:
    with pytest.warns(UserWarning, match="`text_config` alone is imported"):
        return moec.reference(moec.from_hf(config)).eval()


def test_every_model_of_images_that_is_imported_is_tried() -> None:
    assert MODELS.keys() == AROUND.keys()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", MODELS)
def test_its_decoder_computes_the_same(model_type: str, tied: bool, tmp_path: Path) -> None:
    theirs = made(model_type, tie_word_embeddings=tied)
    ours = read(json.loads(json.dumps(theirs.config.to_dict(), default=str)))
    moec.load_hf(ours, theirs.state_dict())
    wanted = logits_of(theirs)
    assert wanted.std() > 1e-3
    torch.testing.assert_close(logits_of(ours), wanted, rtol=0, atol=1e-5 * max(1.0, float(wanted.abs().max())))
    moec.save_hf(ours, tmp_path / "decoder")
    if model_type != "mistral3":  # transformers has no automatic class for Mistral 4
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder").eval()
        torch.testing.assert_close(logits_of(again), wanted, rtol=0, atol=1e-5 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("model_type", sorted(MODELS.keys() - {"kimi_k25"}))
def test_its_folder_loads(model_type: str, tmp_path: Path) -> None:
    """transformers 5.23 saves layers of Kimi K2.5's decoder under a name that its own checkpoints do not have."""
    theirs = made(model_type)
    theirs.save_pretrained(tmp_path)
    ours = read(tmp_path)
    moec.load_hf(ours, tmp_path)
    wanted = logits_of(theirs)
    torch.testing.assert_close(logits_of(ours), wanted, rtol=0, atol=1e-5 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("model_type", sorted(MODELS.keys() - {"kimi_k25", "mistral3"}))
@pytest.mark.parametrize("like", [True, False])
def test_an_export_is_its_decoder_by_itself(model_type: str, like: bool, tmp_path: Path) -> None:
    """Imported from the whole checkpoint, and exported, with and without the folder that it is like."""
    theirs = made(model_type)
    theirs.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "tokenizer.json").write_text("{}")
    import_weights(tmp_path / "whole", tmp_path / "checkpoint", version="0")
    moved = export_weights(
        tmp_path / "checkpoint", tmp_path / "decoder", version="0", like=tmp_path / "whole" if like else None
    )
    assert moved.left_out == ()
    assert ["only the decoder is exported" in (note.message or "") for note in moved.notes] == [True]
    assert (tmp_path / "decoder" / "tokenizer.json").read_text() == "{}"
    again, wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder").eval(), logits_of(theirs)
    torch.testing.assert_close(logits_of(again), wanted, rtol=0, atol=1e-5 * max(1.0, float(wanted.abs().max())))


def test_experts_of_qwen3_vl_as_they_are_on_the_hub(tmp_path: Path) -> None:
    """[experts, in, out], as the released checkpoints have them."""
    theirs = made("qwen3_vl_moe")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(turned, tmp_path / "model.safetensors")
    ours = read(tmp_path)
    moec.load_hf(ours, tmp_path)
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=1e-4)


def test_older_positions_of_qwen3_vl_read_alike() -> None:
    config = json.loads(json.dumps(made("qwen3_vl_moe").config.to_dict(), default=str))
    older = json.loads(json.dumps(config))
    rope = older["text_config"].pop("rope_parameters")
    older["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "mrope_interleaved": True}}
    assert read(older).spec.model == read(config).spec.model


def test_a_decoder_that_is_not_imported_is_named() -> None:
    with pytest.raises(DiagnosticError, match="`llama4_text`, the decoder of `llama4`: a router's weights"):
        moec.from_hf({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}})
    with pytest.raises(DiagnosticError, match=r"`text_config.model_type` is \"gemma3_text\""):
        moec.from_hf({"model_type": "mistral3", "text_config": {"model_type": "gemma3_text", "vocab_size": VOCAB}})
