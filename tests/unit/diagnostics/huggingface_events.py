"""Diagnostics of Hugging Face's models, as `page_events.py` has the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_events import raised
from safetensors.torch import load_file, save_file

import moec
from moec.grammar.diagnostics import Diagnostic
from moec.grammar.huggingface.read import read_config

CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}


def written(**changes: Any) -> Path:
    """A config with these keys changed."""
    path = Path("config.json")
    path.write_text(json.dumps({**CONFIG, **changes}, indent=2))
    return path


def saved() -> Path:
    """A folder with weights."""
    moec.save_hf(moec.reference(moec.from_hf(CONFIG)), "mixtral")
    return Path("mixtral")


def loaded(change: Callable[[dict[str, torch.Tensor]], object]) -> Sequence[Diagnostic]:
    """What is raised for a folder whose tensors are changed."""
    folder = saved()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    module = moec.reference(moec.from_hf(folder))
    return raised(lambda: moec.load_hf(module, folder))


def no_folder() -> Sequence[Diagnostic]:
    return raised(lambda: moec.from_hf("Mixtral-8x7B-v0.1"))


def unknown_type() -> Sequence[Diagnostic]:
    return raised(lambda: moec.from_hf(written(model_type="mixtrall")))


def wrong_values() -> Sequence[Diagnostic]:
    path = written(rms_norm_eps=float("nan"))
    return raised(lambda: moec.from_hf(path))


def another_activation() -> Sequence[Diagnostic]:
    return raised(lambda: moec.from_hf(written(hidden_act="gelu_pytorch_tanh")))


def jitter() -> Sequence[Diagnostic]:
    return read_config(written(router_jitter_noise=0.01)).notes


def truncated() -> Sequence[Diagnostic]:
    folder = saved()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    module = moec.reference(moec.from_hf(folder))
    return raised(lambda: moec.load_hf(module, folder))


def missing_expert() -> Sequence[Diagnostic]:
    return loaded(lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.3.w2.weight"))


def quantised() -> Sequence[Diagnostic]:
    name = "lm_head.weight"
    return loaded(lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))


def no_such_architecture() -> Sequence[Diagnostic]:
    spec = moec.from_hf(CONFIG)
    layers = tuple(
        layer.replace(moe=layer.moe.replace(residual=layer.moe.parts[0].body)) for layer in spec.model.layers
    )
    module = moec.reference(spec.replace(model=spec.model.replace(layers=layers)))
    return raised(lambda: moec.save_hf(module, "out", model_type="mixtral"))


def existing_folder() -> Sequence[Diagnostic]:
    folder = saved()
    module = moec.reference(moec.from_hf(folder))
    return raised(lambda: moec.save_hf(module, folder))


def narrower_experts() -> Sequence[Diagnostic]:
    from moec.runtime.huggingface.upcycle import Upcycling, upcycle

    dense = {key: value for key, value in CONFIG.items() if "experts" not in key} | {"model_type": "llama"}
    moec.save_hf(moec.reference(moec.from_hf(dense)), "llama")
    spec = moec.from_hf(CONFIG | {"intermediate_size": 12, "rms_norm_eps": 1e-6, "rope_theta": 1e4})
    return raised(lambda: upcycle(Path("llama"), spec, Path("0"), "test", Upcycling()))


HUGGINGFACE_EVENTS: dict[str, Callable[[], Sequence[Diagnostic]]] = {
    "MOE0900": no_folder,
    "MOE0901": unknown_type,
    "MOE0902": wrong_values,
    "MOE0903": another_activation,
    "MOE0904": jitter,
    "MOE0905": truncated,
    "MOE0906": missing_expert,
    "MOE0907": quantised,
    "MOE0908": no_such_architecture,
    "MOE0909": existing_folder,
    "MOE0910": narrower_experts,
}
