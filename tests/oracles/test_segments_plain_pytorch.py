"""Packed texts against the handwritten model: capacity, balance terms and gradients are those of the texts alone."""

from __future__ import annotations

import pytest
import torch
from oracles.same import pair, require_results
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainModel
from torch import Tensor

from moec.grammar.spec import Spec
from moec.runtime.verify.unsharded import training_loss

ORACLE_OF = {
    "tokens": "segments separator",
}

SEPARATOR = 7
LENGTHS = [[5, 1, 7], [13], [1, 1, 11], [4, 9]]
BESIDE = {
    "dropless": "",
    "factor": "capacity = factor(0.6)",
    "least": "capacity = factor(0.25, min = 2)",
    "eval": "capacity = factor(0.5, eval = 1.25)",
    "dynamic-max": "capacity = dynamic(max = 0.7)",
    "dynamic": "capacity = dynamic()",
    "shared": "capacity = factor(1.0); shared = swiglu(12)",
}


def spec_of(beside: str, embedding: str) -> Spec:
    return small_spec(
        f"""layers {{
          attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
          moe {{ experts = 5 * swiglu(12); gate = topk(2, normalize = true)
                 balance = [switch_loss(0.3), z_loss(0.05)]; {beside} }}
        }}""",
        embedding=embedding,
    )


def batch(separators: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and segments of four sequences of 13 tokens; with `separators` they end each text but the last."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(SEPARATOR + 1, VOCAB, (4, 13), generator=generator)
    labels = torch.randint(VOCAB, (4, 13), generator=generator)
    labels[torch.rand(4, 13, generator=generator) < 0.2] = -100
    segments = torch.zeros_like(tokens)
    for row, lengths in enumerate(LENGTHS):
        for end in torch.tensor(lengths).cumsum(0).tolist()[:-1]:
            segments[row, end:] += 3
            if separators:
                tokens[row, end - 1] = SEPARATOR
    return tokens, labels, segments


def alone(plain: PlainModel, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the loss with balance terms weighted by tokens, of each text as a batch of its own."""
    logits, balance = [], torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        parts = []
        for text in tokens[row].split(lengths):
            found, only_balance = plain(text[None], torch.full((1, len(text)), -100))
            parts.append(found[0])
            balance = balance + only_balance * len(text) / tokens.numel()
        logits.append(torch.cat(parts))
    whole = torch.stack(logits)
    return whole, torch.nn.functional.cross_entropy(whole.flatten(0, 1), labels.flatten()) + balance


@pytest.mark.parametrize("how", ["segments = true", f"separator = {SEPARATOR}"])
@pytest.mark.parametrize(("beside", "training"), [*((beside, True) for beside in BESIDE), ("eval", False)])
def test_packed_texts_are_the_texts_alone(beside: str, how: str, training: bool) -> None:
    ours, plain, _ = pair(spec_of(BESIDE[beside], f"tokens({how}, positions = learned)"))
    tokens, labels, segments = batch(separators="separator" in how)
    given = {"segments": segments} if "segments" in how else {}
    output = ours.train(training)(tokens, labels, **given)
    found, expected = (output.logits, training_loss(ours, output)), alone(plain.train(training), tokens, labels)
    require_results(ours, plain, found, expected)
