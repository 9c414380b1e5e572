"""A dense model whose ranks cut no sequence takes any length: it trains and generates as on one rank."""

from __future__ import annotations

import torch
from support.ranks.gloo_pool import GlooPool
from support.recomputed_generation import livelier
from torch import Tensor

import moec
from moec.grammar import load_text
from moec.runtime.host.reference import reference

TEXT = """\
model "m" {
  vocab = 32; dim = 16; context = 31; depth = 2; dtype = fp32
  layers { attention = gqa(heads = 4, kv_heads = 2, rope = rope()); ffn = swiglu(8) }
}
cluster "c" { device = cpu; level "node" { size = 2 } }
train { batch = 3; sequence = 7; optimizer = sgd(lr = 0.1) }
parallel { tp = 2; sequence_parallel = false }
"""
TOKENS = torch.arange(3 * 7).view(3, 7) * 5 % 32
PROMPTS = [torch.arange(length) * 3 % 32 for length in (5, 2, 3)]


def as_rank(steps: int) -> tuple[list[float], Tensor]:
    with moec.launch(moec.compile(TEXT), device="cpu", timeout=60) as job:
        model = livelier(job.build(seed=1))
        optimizer = job.optimizer(model)
        losses = []
        for _ in range(steps):
            losses.append(float(job.step(model, TOKENS, TOKENS)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, model.generate(PROMPTS, max_new_tokens=4).tokens


def test_a_length_that_tp_does_not_divide_trains_and_generates_as_on_one_rank(gloo: GlooPool) -> None:
    results = gloo.run(2, as_rank, 3)
    spec = load_text(TEXT).unwrap()
    model = livelier(reference(spec, seed=1))
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(TOKENS).logits.flatten(0, 1), TOKENS.flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    expected = model.generate(PROMPTS, max_new_tokens=4).tokens
    for found, tokens in results:
        torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
        assert torch.equal(tokens, expected)
