"""Packed sequences against the handwritten model: each text of a sequence as if it stood there alone."""

from __future__ import annotations

import pytest
import torch
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainModel
from plain_weights import plain_state_dict
from torch import Tensor

from moec.runtime.job.reference import reference

ORACLE_OF = {
    "tokens": "separator positions",
}

SEPARATOR = 7
MIXTURE = "moe { experts = 5 * swiglu(20); gate = topk(2) }"
LAYERS = {
    "rope": "layers { attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope()); " + MIXTURE + " }",
    "no positions": "layers { attention = mha(heads = 4); ffn = gelu(32) }",
    "alternating": "layers 0 { attention = mha(heads = 4, rope = rope()); ffn = gelu(32) }\n"
    "layers 1 { attention = mha(heads = 4); " + MIXTURE + " }",
}
ROWS = {
    "inside": [3, 1, SEPARATOR, 4, 5, 9, SEPARATOR, 2, 6, 8, 3, 1, 2],
    "first and last": [SEPARATOR, 1, 2, 4, 5, 9, 6, 2, 6, 8, 3, 1, SEPARATOR],
    "side by side": [3, SEPARATOR, SEPARATOR, SEPARATOR, 5, 9, 6, 2, 6, 8, 3, 1, 4],
    "none": [3, 1, 2, 4, 5, 9, 6, 2, 6, 8, 3, 1, 4],
}


def texts(row: list[int]) -> list[list[int]]:
    """The texts of a sequence; a separator is the last token of its text."""
    found: list[list[int]] = [[]]
    for token in row:
        found[-1].append(token)
        if token == SEPARATOR:
            found.append([])
    return [text for text in found if text]


def alone(plain: PlainModel, row: list[int]) -> Tensor:
    """The logits of the texts, one after the other, each computed alone."""
    return torch.cat([plain(torch.tensor([text]))[0][0] for text in texts(row)])


@pytest.mark.parametrize("positions", ["none", "learned"])
@pytest.mark.parametrize("layers", LAYERS)
def test_each_text_is_computed_as_if_alone(layers: str, positions: str) -> None:
    spec = small_spec(LAYERS[layers], embedding=f"tokens(separator = {SEPARATOR}, positions = {positions})")
    ours, plain = reference(spec, dtype=torch.float64), PlainModel(spec, torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    plain.load_state_dict(plain_state_dict(dict(ours.named_parameters())))
    tokens = torch.tensor(list(ROWS.values()))
    cotangent = torch.randn(*tokens.shape, VOCAB, generator=generator, dtype=torch.float64)
    logits, expected = ours(tokens).logits, torch.stack([alone(plain, row) for row in ROWS.values()])
    tight = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(logits, expected, **tight)
    (logits * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    found = plain_state_dict({name: parameter.grad for name, parameter in ours.named_parameters()})
    for name, parameter in plain.named_parameters():
        expected_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected_gradient, **tight, msg=lambda text, n=name: f"{n}: {text}")
