"""tu#303: an option of 0 was read as one that is not given. Here 0 is refused, or does what 0 says."""

from __future__ import annotations

import pytest
import torch
from support.plans import moe_spec, moe_text

from moec.grammar import load_text
from moec.grammar.diagnostics import Severity
from moec.runtime.host.reference import reference

TOKENS = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(5))
ROPE = "mha(heads = 4, rope = rope({}))"
REFUSED: dict[str, list[str]] = {
    "beside": [
        "capacity = factor(0)",
        "capacity = factor(1, eval = 0)",
        "capacity = factor(1, min = 0)",
        "capacity = dynamic(max = 0)",
        "shared = lora(0)",
        "shared = lora(4, alpha = 0)",
    ],
    "gate": [
        "topk(0)",
        "topk(2, scale = 0)",
        "topk(2, groups = 0)",
        "topk(2, groups = 2, keep_groups = 0)",
        "topk(2, bias = online(0))",
        "expert_choice(0)",
        "soft(0)",
        "dselect_k(2, gamma = 0)",
        "hash(0)",
    ],
    "balance": ["[device_loss(0.1, groups = 0)]"],
    "expert": ["swiglu(0)", "swiglu(8, clamp = 0)", "swiglu(8, alpha = 0)", "conv(8, kernel = 0)"],
    "attention": [
        "mha(heads = 4, window = 0)",
        "mha(heads = 4, clip = 0)",
        "mha(heads = 4, multiplier = 0)",
        "mha(heads = 4, head_dim = 0)",
        "mla(heads = 4, kv_rank = 8, nope_dim = 8, rope_dim = 4, value_dim = 8, q_rank = 0, rope = rope())",
        *(
            ROPE.format(what)
            for what in (
                "fraction = 0",
                "theta = 0",
                "scaling = linear(0)",
                "scaling = ntk(2, original = 0)",
                "scaling = yarn(0, original = 4)",
                "scaling = llama3(0, low = 1, high = 4, original = 4)",
                "scaling = longrope(short = [0, 1], long = [1, 1], original = 4)",
            )
        ),
    ],
    "model": [
        "embedding = tokens(multiplier = 0)",
        "embedding = tokens(logits_multiplier = 0)",
        "residual_multiplier = 0",
        "context = 0",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("option", "written"), [(option, one) for option, all_ in REFUSED.items() for one in all_])
def test_zero_is_not_read_as_not_given(option: str, written: str) -> None:
    loaded = load_text(moe_text(ranks=1, ep=1, **{option: written}), name="a.moe")
    errors = [found for found in loaded.diagnostics if found.severity is Severity.ERROR]
    assert errors
    assert all(found.span is not None and "MOE02" in found.code for found in errors)


NOTHING = {
    "topk(2, jitter = 0)": "topk(2)",
    "topk(2, noise = 0)": "topk(2)",
    "switch(jitter = 0)": "switch",
    "sparsemixer(2, jitter = 0)": "topk(2, order = before)",
    "dselect_k(2, entropy = 0)": "dselect_k(2)",
    "hash(2, seed = 0)": "hash(2)",
}
"""What equals what, in training; a candidate of `sparsemixer` that is no nearer than the best is the best alone."""


@pytest.mark.parametrize("gate", NOTHING)
def test_a_zero_that_is_allowed_is_nothing(gate: str) -> None:
    found, expected = (
        reference(moe_spec(ranks=1, ep=1, depth=2, balance="[]", gate=one), seed=1) for one in (gate, NOTHING[gate])
    )
    found(TOKENS), expected(TOKENS)
    assert all(torch.equal(found.expert_counts[layer], counts) for layer, counts in expected.expert_counts.items())
    if "sparsemixer" not in gate:
        assert torch.equal(found(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize("name", ["padding", "separator"])
def test_the_id_0_is_an_id(name: str) -> None:
    """The embeddings of ids 0 and 5 are equal, and so are results with either id."""
    of_0, of_5 = (
        reference(moe_spec(ranks=1, ep=1, model=f"embedding = tokens({name} = {id})"), seed=1) for id in (0, 5)
    )
    with torch.no_grad():
        for model in (of_0, of_5):
            weight = model.get_parameter("embedding.weight")
            weight[0] = weight[5]
    tokens = TOKENS.masked_fill(TOKENS == 5, 1).masked_fill(torch.arange(8) == 3, 0)
    found, expected = of_0(tokens), of_5(tokens.masked_fill(tokens == 0, 5))
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.aux_loss, expected.aux_loss)
    unmarked = reference(moe_spec(ranks=1, ep=1), seed=1)
    unmarked.load_state_dict(of_0.state_dict())
    assert not torch.equal(unmarked(tokens).logits, found.logits)
