"""Packed sequences against the handwritten model: each text of a sequence as if it stood there alone."""

from __future__ import annotations

import pytest
import torch
from oracles.same import pair, require_results
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainModel
from torch import Tensor

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
    ours, plain, generator = pair(spec)
    tokens = torch.tensor(list(ROWS.values()))
    cotangent = torch.randn(*tokens.shape, VOCAB, generator=generator, dtype=torch.float64)
    logits, expected = ours(tokens).logits, torch.stack([alone(plain, row) for row in ROWS.values()])
    require_results(ours, plain, (logits, (logits * cotangent).sum()), (expected, (expected * cotangent).sum()))
