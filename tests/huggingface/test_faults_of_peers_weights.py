"""Faults of other frameworks that concern weights of Hugging Face; docs/internals/faults.md has them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface.decoders import config_of
from huggingface.equal import both, made, require_equal_logits, text
from safetensors.torch import load_file, save_file

import moec
from moec.grammar.diagnostics import DiagnosticError


def test_expert_10_does_not_come_before_expert_2(tmp_path: Path) -> None:
    """Twelve experts by number: sorted as text, expert 10 would be the third."""
    pair = both(tmp_path / "theirs", "qwen3_moe", **config_of("qwen3_moe") | {"num_local_experts": 12})
    down = dict(pair.ours.named_parameters())["layers.1.moe.experts.down.weight"]
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    for number in range(12):
        assert torch.equal(down[number], stored[f"model.layers.1.mlp.experts.{number}.down_proj.weight"])
    require_equal_logits(pair, text())


def test_names_without_a_mapping_are_not_dropped(tmp_path: Path) -> None:
    made("mixtral", **config_of("mixtral")).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, path)
    module = moec.reference(moec.from_hf(tmp_path))
    with pytest.raises(DiagnosticError, match=r"MOE0906.*q_proj\.bias"):
        moec.load_hf(module, tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_untied_heads_are_not_tied_and_tied_heads_are_no_empty_files(tied: bool, tmp_path: Path) -> None:
    pair = both(tmp_path / "theirs", "mixtral", **config_of("mixtral") | {"tie_word_embeddings": tied})
    moec.save_hf(pair.ours, tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert stored["model.embed_tokens.weight"].abs().sum() > 0
    if not tied:
        assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    made("mixtral", **config_of("mixtral", "tied")).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    module = moec.reference(moec.from_hf(tmp_path))
    with pytest.raises(DiagnosticError, match=r"MOE0907.*lm_head\.weight differs"):
        moec.load_hf(module, tmp_path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    moec.load_hf(module, tmp_path)


def test_the_bias_of_gpt_oss_router_is_loaded_and_saved(tmp_path: Path) -> None:
    pair = both(tmp_path / "theirs", "gpt_oss", **config_of("gpt_oss"))
    bias = dict(pair.ours.named_parameters())["layers.2.moe.gate.bias"]
    theirs = pair.theirs.state_dict()["model.layers.2.mlp.router.bias"]
    assert theirs.abs().max() > 0
    assert torch.equal(bias, theirs)
    moec.save_hf(pair.ours, tmp_path / "ours")
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")["model.layers.2.mlp.router.bias"], theirs)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "ernie4_5_moe"])
def test_weights_are_not_taken_from_biased_scores(model_type: str, tmp_path: Path) -> None:
    """Biases so large that weights made from them would be far off."""
    pair = both(tmp_path / "theirs", model_type, **config_of(model_type))
    state = pair.theirs.state_dict()
    for name, tensor in state.items():
        if "e_score_correction_bias" in name:
            tensor += torch.linspace(-5, 5, tensor.numel()).view(tensor.shape)
    moec.load_hf(pair.ours, state)
    require_equal_logits(pair, text())
