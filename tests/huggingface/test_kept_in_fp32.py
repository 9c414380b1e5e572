"""Routers and sinks that transformers keeps in fp32 in a model of bf16: read, computed with, trained and written so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from huggingface.decoders import ROWS, config_of, usual
from huggingface.equal import class_of, made, text
from huggingface.test_weights import VERSION, require_refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import moec
from moec.runtime.huggingface.checkpoints import export_weights, import_weights, plan_of
from moec.runtime.model.module import PlanModule

KEPT = {"ernie4_5_moe": ("routers",), "flint": ("routers", "sinks"), "hunyuan_v1_moe": ("routers",)}
ROUTERS, SINKS, BIAS = (".gate.weight", ".gate.wg.weight"), ".sinks", ".e_score_correction_bias"
"""The ends of the names of parameters that transformers keeps."""


def folder_of(path: Path, model_type: str) -> Path:
    """A model of bf16 whose experts' router rows differ by less than what bf16 keeps: rounded, all are equal."""
    model = made(model_type, **config_of(model_type), dtype="bfloat16")
    draw = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith((*ROUTERS, SINKS)):
            parameter.data = 2**-3 + 2**-13 * torch.randn(parameter.shape, generator=draw)
        elif name.endswith(BIAS):
            parameter.data = torch.zeros_like(parameter)
        else:
            parameter.data = parameter.data.bfloat16()
    model.save_pretrained(path)
    return path


def theirs_in(folder: Path, model_type: str) -> PreTrainedModel:
    kind = class_of(model_type)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    found: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.bfloat16, **how).eval()
    return found


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(text()).logits.float()
    return found


def distance(one: Tensor, other: Tensor) -> float:
    """The mean, relative: in bf16 a token at a near tie may go to another expert, which its logits show."""
    return float((one - other).abs().mean() / other.abs().mean())


def ours_in(folder: Path, keep: bool = True) -> PlanModule:
    spec = moec.from_hf(folder)
    model = spec.model if keep else spec.model.replace(keep_in_fp32=())
    module = moec.reference(spec.replace(model=model))
    moec.load_hf(module, folder)
    return module.eval()


def test_configs_of_these_families_keep_them() -> None:
    read = {model_type: moec.from_hf(usual(model_type, torch_dtype="bfloat16")).model for model_type in ROWS}
    assert {model_type: model.keep_in_fp32 for model_type, model in read.items() if model.keep_in_fp32} == KEPT
    assert not any(moec.from_hf(usual(model_type)).model.keep_in_fp32 for model_type in KEPT)  # fp32 keeps all


@pytest.mark.parametrize("model_type", KEPT)
def test_logits_are_those_of_routers_in_fp32(model_type: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_type)
    theirs = theirs_in(folder, model_type)
    assert {p.dtype for name, p in theirs.named_parameters() if name.endswith((*ROUTERS, SINKS))} == {torch.float32}
    expected = logits_of(theirs)
    off = distance(logits_of(ours_in(folder)), expected)
    with pytest.warns(UserWarning, match=r"in its config `keep_in_fp32` is \[routers.*\], and in the model \[\]"):
        rounds = ours_in(folder, keep=False)
    assert off < 0.1
    assert distance(logits_of(rounds), expected) > 3 * off


@pytest.mark.parametrize("model_type", KEPT)
def test_what_trained_is_written_in_fp32(model_type: str, tmp_path: Path) -> None:
    module = ours_in(folder_of(tmp_path / "theirs", model_type)).train()
    module(text(), text()).loss.backward()
    torch.optim.SGD(module.parameters(), lr=1e-3).step()
    moec.save_hf(module, tmp_path / "saved")
    import_weights(tmp_path / "saved", tmp_path / "checkpoint", VERSION)
    export_weights(tmp_path / "checkpoint", tmp_path / "exported", VERSION, plan=plan_of(module.spec, VERSION))
    before, saved, exported = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "saved", "exported")
    )
    assert saved.keys() == before.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == before[name].dtype, name
        assert torch.equal(tensor, exported[name]), name
    kept = {name: tensor for name, tensor in saved.items() if name.endswith((*ROUTERS, SINKS))}
    assert kept
    for name, tensor in kept.items():
        assert tensor.dtype == torch.float32, name
        assert not torch.equal(tensor, tensor.bfloat16().float()), name
    as_before = load_file(tmp_path / "theirs" / "model.safetensors")
    like = tmp_path / "rounded"  # as it was saved before there was a word for it
    shutil.copytree(tmp_path / "theirs", like)
    save_file({name: tensor.bfloat16() for name, tensor in as_before.items()}, like / "model.safetensors")
    export_weights(tmp_path / "checkpoint", tmp_path / "alike", VERSION, like=like)
    for name, tensor in load_file(tmp_path / "alike" / "model.safetensors").items():
        assert torch.equal(tensor, saved[name]), name
    again, expected = theirs_in(tmp_path / "saved", model_type), logits_of(module.eval())
    assert distance(logits_of(again), expected) < 0.1


def test_other_families_cannot_say_it_and_rounded_ones_can_be_saved(tmp_path: Path) -> None:
    mixtral = moec.from_hf(usual("mixtral", torch_dtype="bfloat16"))
    keeps = mixtral.replace(model=mixtral.model.replace(keep_in_fp32=("routers",)))
    require_refused("MOE0908", "`keep_in_fp32`", lambda: moec.save_hf(moec.reference(keeps), tmp_path / "0"))
    ernie = moec.from_hf(usual("ernie4_5_moe", torch_dtype="bfloat16"))
    rounds = ernie.replace(model=ernie.model.replace(keep_in_fp32=()))
    moec.save_hf(moec.reference(rounds), tmp_path / "1")
    written = load_file(tmp_path / "1" / "model.safetensors")
    assert {tensor.dtype for name, tensor in written.items() if name.endswith(".gate.weight")} == {torch.bfloat16}
