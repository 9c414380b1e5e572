"""The places of norms, and parallel residuals, against handwritten models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracles.plain_parts import Parameters, attention, gelu_ffn, of_layer, rms_norm, swiglu_mixture
from oracles.same import TIGHT, batch, require_gradients, spread
from oracles.specs import BATCH, SEQUENCE, VOCAB
from torch import Tensor

from moec.driver import to_spec
from moec.runtime.host.reference import reference

ORACLE_OF = {
    "model": "norm_place parallel_residual",
}

EPS = 1e-5


def text(model: str) -> str:
    return f"""
        model "small" {{
          vocab = {VOCAB}; dim = 24; depth = 2; dtype = fp32; {model}
          layers   {{ attention = mha(heads = 3) }}
          layers 0 {{ attention = gqa(heads = 4, kv_heads = 2); ffn = gelu(32) }}
          layers 1 {{ moe {{ experts = 5 * swiglu(20); gate = topk(2, normalize = true) }} }}
        }}
        cluster "here" {{ device = cpu; level "process" {{ size = 1 }} }}
        train {{ batch = {BATCH}; sequence = {SEQUENCE} }}
    """


def normed(p: Parameters, name: str, x: Tensor) -> Tensor:
    """RMS norm, or layer norm where there is a bias."""
    if f"{name}.bias" not in p:
        return rms_norm(x, p[f"{name}.weight"], EPS)
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + EPS).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]


def feed(p: Parameters, h: Tensor) -> Tensor:
    return gelu_ffn(p, h) if "ffn.up.weight" in p else swiglu_mixture(p, h, 2)


def post(p: Parameters, x: Tensor, r: float) -> Tensor:
    x = normed(p, "attention_post_norm", x + r * attention(p, x))
    return normed(p, "ffn_post_norm", x + r * feed(p, x))


def res_post(p: Parameters, x: Tensor, r: float) -> Tensor:
    x = x + r * normed(p, "attention_post_norm", attention(p, x))
    return x + r * normed(p, "ffn_post_norm", feed(p, x))


def sandwich(p: Parameters, x: Tensor, r: float) -> Tensor:
    x = x + r * normed(p, "attention_post_norm", attention(p, normed(p, "attention_norm", x)))
    return x + r * normed(p, "ffn_post_norm", feed(p, normed(p, "ffn_norm", x)))


def one_norm(p: Parameters, x: Tensor, r: float) -> Tensor:
    h = normed(p, "attention_norm", x)
    return x + r * (attention(p, h) + feed(p, h))


def two_norms(p: Parameters, x: Tensor, r: float) -> Tensor:
    return x + r * (attention(p, normed(p, "attention_norm", x)) + feed(p, normed(p, "ffn_norm", x)))


FORMS = {
    "parallel_residual = one_norm": one_norm,
    "parallel_residual = two_norms": two_norms,
    "norm_place = post": post,
    "norm_place = res_post": res_post,
    "norm_place = sandwich": sandwich,
}


@pytest.mark.parametrize("more", ["", "residual_multiplier = 0.4", "norm = layer_norm()"])
@pytest.mark.parametrize("form", FORMS)
def test_the_reference_equals_the_handwritten_model(form: str, more: str) -> None:
    ours = reference(to_spec(text(f"{form}; {more}")), dtype=torch.float64)
    p = spread(ours)
    tokens, labels = batch()
    x = p["embedding.weight"][tokens]
    for number in range(2):
        x = FORMS[form](of_layer(p, number), x, 0.4 if "multiplier" in more else 1.0)
    x = x if "= post" in form else normed(p, "norm", x)
    logits = x @ p["head.weight"].T
    output = ours(tokens, labels)
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    output.loss.backward()
    loss.backward()
    require_gradients(ours, p)
