"""The gate `hash` against a handwritten model: a table gives the experts of each id."""

from __future__ import annotations

import pytest
import torch
from oracles.same import batch, copy_parameters, enlarge, require_same
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainModel, PlainMoe, kept_choices
from torch import Tensor

from moec.runtime.host.reference import reference

ORACLE_OF = {
    "hash": "k seed",
}

EXPERTS, WORD = 5, 2**64
LAYERS = """
    layers {{
      attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())
      moe {{ experts = 5 * {body}; gate = hash({k}, seed = {seed}); {beside} }}
    }}
"""
BESIDE = {
    "dropless": "",
    "dynamic": "capacity = dynamic()",
    "dynamic-max": "capacity = dynamic(max = 0.75); group = batch",
    "factor": "capacity = factor(0.75)",
    "factor-batch": "capacity = factor(1.0, min = 3); group = batch",
    "dense paths": "shared = swiglu(12, gated = true); residual = gelu(12)",
}


class HashedMoe(PlainMoe):
    """`PlainMoe` without a router: `table` [vocab, k] are the experts of each of the `ids` [batch, sequence]."""

    table: Tensor
    ids: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        chosen = self.table[self.ids]
        weights = torch.full_like(chosen, 1 / chosen.shape[-1], dtype=x.dtype)
        factor, least = self.places()
        if factor is not None:
            groups = chosen.shape[0] if self.group == "sequence" else 1
            weights = weights * kept_choices(chosen, factor, least, groups, self.num_experts)
        mixed = self.mix(x.flatten(0, 1), weights, chosen).view_as(x)
        return self.with_dense_paths(x, mixed), 0.0


def experts_of_ids(k: int, seed: int) -> Tensor:
    """The table, [vocab, k]: experts in the order of their numbers, the largest first."""

    def split_mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
        return x ^ (x >> 31)

    def number(token: int, expert: int) -> int:
        x = split_mix((split_mix(seed) + 0x9E3779B97F4A7C15 * (token * 2**31 + expert)) % WORD)
        return x - WORD if x >= WORD // 2 else x

    ranked = [sorted(range(EXPERTS), key=lambda expert, t=token: -number(t, expert)) for token in range(VOCAB)]
    return torch.tensor(ranked)[:, :k]


@pytest.mark.parametrize(("k", "seed", "body"), [(1, 0, "swiglu(20)"), (2, 7, "gelu(20)"), (5, 1, "swiglu(8)")])
@pytest.mark.parametrize("beside", BESIDE)
def test_reference_equals_the_handwritten_model(beside: str, k: int, seed: int, body: str) -> None:
    spec = small_spec(LAYERS.format(body=body, k=k, seed=seed, beside=BESIDE[beside]))
    ours, plain = reference(spec, dtype=torch.float64), PlainModel(spec, torch.float64)
    tokens, labels = batch(enlarge(ours))
    for module in plain.modules():
        if isinstance(module, PlainMoe):
            module.__class__ = HashedMoe
            module.table, module.ids = experts_of_ids(k, seed), tokens
            del module.gate
    copy_parameters(ours, plain)
    require_same(ours, plain, tokens, labels)
