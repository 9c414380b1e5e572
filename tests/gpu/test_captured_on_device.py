"""`layer.capture` with real CUDA graphs; `tests/unit/jobs/test_captured_layer.py` tests what surrounds them."""

from __future__ import annotations

import pytest
import torch

import moec

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None, reason="needs a CUDA device"
)

TEXT = """
layer "ffn" {
  dim = 512; dtype = bf16
  moe { experts = 8 * swiglu(1024); gate = topk(2, normalize = true); balance = [switch_loss(0.01)] }
}
"""


def test_replays_train_as_calls_without_a_graph() -> None:
    layer, plain = (moec.layer(TEXT, seed=1, device="cuda") for _ in range(2))
    sample = torch.randn(1, 256, 512, device="cuda", requires_grad=True)
    layer.capture(sample)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (layer, plain)]
    for step in range(4):
        results = []
        x = torch.randn(1, 256, 512, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
        for each, optimizer in zip((layer, plain), optimizers, strict=True):
            own = x.clone().requires_grad_()
            y = each(own)
            (y.square().mean() + each.aux_loss).backward()
            results.append([y, each.aux_loss, own.grad, *(p.grad.clone() for p in each.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)
