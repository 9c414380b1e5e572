"""A decoder of transformers with a tiny random config, through moec and back: what must be equal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.families import BY_TYPE
from moec.runtime.model.module import PlanModule

VOCAB, BATCH, SEQUENCE = 64, 2, 24
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "tie_word_embeddings": False,
}


def made(model_type: str, **config: Any) -> PreTrainedModel:
    """A model with random weights, those of norms, biases and sinks too, in evaluation."""
    values = {**TINY, **config}
    known = CONFIG_MAPPING[model_type](**{key: value for key, value in values.items() if value != LEAVE_OUT})
    return of_config(class_of(model_type), known)


def of_config(kind: type[PreTrainedModel], known: PreTrainedConfig) -> PreTrainedModel:
    """The same of a class and its config."""
    torch.manual_seed(0)
    model = kind._from_config(known, attn_implementation="eager", experts_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and "inv_freq" not in name and (tensor.dim() < 2 or "bias" in name):
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return model.eval()


def class_of(model_type: str) -> type[PreTrainedModel]:
    """The class that a saved config names as its architecture."""
    return getattr(transformers, BY_TYPE[model_type].architecture)


LEAVE_OUT = "left out"
"""A value that takes a key of `TINY` out of a config."""


def text(seed: int = 1, sequence: int = SEQUENCE) -> Tensor:
    return torch.randint(1, VOCAB, (BATCH, sequence), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Both:
    """Their model, its folder, and ours with the folder's weights."""

    theirs: PreTrainedModel
    folder: Path
    ours: PlanModule


def both(folder: Path, model_type: str, **config: Any) -> Both:
    theirs = made(model_type, **config)
    theirs.save_pretrained(folder)
    ours = moec.reference(moec.from_hf(folder))
    assert isinstance(ours, PlanModule)
    moec.load_hf(ours, folder)
    return Both(theirs, folder, ours.eval())


def require_equal_logits(pair: Both, tokens: Tensor) -> None:
    with torch.no_grad():
        ours, theirs = pair.ours(tokens).logits, pair.theirs(tokens).logits
    assert theirs.std() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(theirs.abs().max())))


def require_equal_gradients(pair: Both, tokens: Tensor) -> None:
    """Their gradients, saved as weights and loaded through the same rules, are our parameters' gradients."""
    direction = torch.randn(*tokens.shape, VOCAB, generator=torch.Generator().manual_seed(3))
    for model in (pair.theirs, pair.ours):
        (model(tokens).logits * direction).sum().backward()
    grads = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    state = pair.theirs.state_dict()
    if pair.theirs.config.tie_word_embeddings:
        del state["lm_head.weight"]
    state |= {name: gradient for name, gradient in grads.items() if gradient is not None}
    of_gradients = moec.reference(pair.ours.spec)
    moec.load_hf(of_gradients, {name: tensor.clone() for name, tensor in state.items()})
    expected = dict(of_gradients.named_parameters())
    largest = max(float(tensor.detach().abs().max()) for tensor in expected.values())
    for name, parameter in pair.ours.named_parameters():
        wanted = expected[name].detach()
        scale = float(wanted.abs().max())
        assert parameter.grad is not None, name
        error = float((parameter.grad - wanted).abs().max())
        assert error <= 2e-5 * max(scale, 1e-2 * largest), f"{name}: off by {error:.1e} of {scale:.1e}"


def require_saved_alike(pair: Both, folder: Path) -> None:
    """`save_hf` writes the tensors of `save_pretrained`, and a config of which transformers makes the same model."""
    model_type = json.loads((pair.folder / "config.json").read_text())["model_type"]
    moec.save_hf(pair.ours, folder, model_type=model_type)
    one, two = (safetensors.torch.load_file(each / "model.safetensors") for each in (pair.folder, folder))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name
    assert (pair.folder / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    again = (
        class_of(model_type).from_pretrained(folder, attn_implementation="eager", experts_implementation="eager").eval()
    )
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(again).__name__]
    tokens = text()
    with torch.no_grad():  # equal weights at other addresses: a product may be rounded otherwise
        torch.testing.assert_close(again(tokens).logits, pair.theirs(tokens).logits, rtol=1e-6, atol=1e-6)


def refusal(model_type: str, **config: Any) -> str:
    """What `from_hf` says of a config: the codes and messages of its errors."""
    values = {**TINY, **config, "model_type": model_type}
    try:
        moec.from_hf({key: value for key, value in values.items() if value is not None and value != LEAVE_OUT})
    except DiagnosticError as error:
        return "\n".join(f"{each.code}: {each.message}" for each in error.diagnostics)
    return ""
