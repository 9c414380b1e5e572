"""The reference against the same model written by hand in plain PyTorch: logits, loss and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from oracles.same import copy_parameters, require_same, spread
from oracles.specs import BATCH, SEQUENCE, VOCAB, small_spec
from plain_moe import PlainModel
from support.combinations import covering, some
from torch import Tensor

import moec
from moec.grammar.spec import Spec
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule

ORACLE_OF = {
    "topk": "k score order normalize",
    "switch": "",
    "switch_loss": "",
    "z_loss": "",
    "loss": "weight",
    "swiglu": "",
    "geglu": "",
    "gelu": "",
    "relu": "",
    "relu2": "",
    "silu": "",
    "feedforward": "hidden bias gated",
    "moe": "experts gate shared residual capacity balance group",
    "factor": "factor eval min",
    "dynamic": "max",
    "dropless": "",
    "rms": "eps",
    "layer_norm": "eps bias",
    "tokens": "tied positions",
    "layers": "attention ffn moe",
    "model": "vocab dim depth norm layers",
}

MHA = "attention = mha(heads = 3)"
GQA = "attention = gqa(heads = 4, kv_heads = 2, head_dim = 6, rope = rope())"


def moe(gate: str, *, body: str = "swiglu(20)", experts: int = 5, balance: str = "", beside: str = "") -> str:
    terms = f"balance = [{balance}]" if balance else ""
    return f"moe {{ experts = {experts} * {body}; gate = {gate}; {terms}; {beside} }}"


def layers(attention: str, rest: str) -> str:
    return f"layers {{ {attention}; {rest} }}"


BOTH = "switch_loss(0.3), z_loss(0.05)"
SPECS = {
    "mha": layers(MHA, "ffn = swiglu(32)"),
    "mha-rope": layers("attention = mha(heads = 4, rope = rope(theta = 500))", "ffn = gelu(32)"),
    "gqa-rope": layers(GQA, "ffn = swiglu(32)"),
    "gqa-no-rope": layers("attention = gqa(heads = 6, kv_heads = 2)", "ffn = gelu(32)"),
    "gqa-one-kv-head": layers("attention = gqa(heads = 2, kv_heads = 1, head_dim = 16)", "ffn = gelu(8)"),
    "qkv-bias": layers(
        "attention = gqa(heads = 4, kv_heads = 2, rope = rope(), bias = qkv)", "ffn = gelu(8, bias = true)"
    ),
    "all-biases": layers("attention = mha(heads = 4, bias = all)", "ffn = swiglu(8, bias = true)"),
    "qk-norm-head": layers(
        "attention = gqa(heads = 4, kv_heads = 2, rope = rope(), bias = qkv, qk_norm = head)", moe("topk(2)")
    ),
    "qk-norm-head-mha": layers("attention = mha(heads = 3, qk_norm = head)", "ffn = swiglu(8)"),
    "qk-norm-projection": layers(
        "attention = gqa(heads = 4, kv_heads = 2, rope = rope(), qk_norm = projection)", moe("topk(2)")
    ),
    "qk-norm-projection-mha": layers("attention = mha(heads = 3, qk_norm = projection)", "ffn = swiglu(8)"),
    "shared-bias": layers(
        MHA, moe("topk(2)", beside="shared = geglu(8, bias = true, gated = true); residual = relu(8, bias = true)")
    ),
    "expert-biases": layers(GQA, moe("topk(2, normalize = true)", body="swiglu(12, bias = true)", balance=BOTH)),
    "expert-biases-gelu": layers(MHA, moe("topk(1)", body="gelu(12, bias = true)", beside="capacity = factor(0.75)")),
    "one-expert": layers(MHA, moe("topk(1)", experts=1, balance=BOTH)),
    "gelu-experts": layers(GQA, moe("topk(2)", body="gelu(20)", balance=BOTH)),
    "switch-loss": layers(GQA, moe("topk(2)", balance="switch_loss(0.3)")),
    "switch": layers(GQA, moe("switch", balance="switch_loss(0.3)")),
    "z-loss": layers(GQA, moe("topk(2, score = sigmoid)", balance="z_loss(0.3)")),
    "no-balance": layers(GQA, moe("topk(3, normalize = true)")),
    "all-experts": layers(MHA, moe("topk(5, order = after)", balance=BOTH)),
    "mixed-dense-and-moe": f"""
        layers {{ {GQA}; ffn = swiglu(32) }}
        layers 1..3 step 2 {{ {moe("topk(2)", balance=BOTH)} }}
        layers 3 {{ attention = mha(heads = 3); moe {{ gate = topk(1); experts = 4 * gelu(16) }} }}
    """,
}
BESIDE = {
    "shared": "shared = swiglu(12)",
    "shared-gated": "shared = gelu(12, gated = true)",
    "residual": "residual = gelu(12)",
    "shared-and-residual": "shared = geglu(12, gated = true); residual = relu(12)",
}
SPECS |= {name: layers(GQA, moe("topk(2)", balance=BOTH, beside=beside)) for name, beside in BESIDE.items()}
FACTORS = ("0.5", "1.0, min = 3", "1.25"), ("sequence", "batch", "rank"), (1, 2)
SPECS |= {
    f"capacity-{factor}-{group}-{k}": layers(
        GQA,
        moe(
            f"topk({k}, normalize = true)",
            experts=4,
            balance=BOTH,
            beside=f"capacity = factor({factor}); group = {group}",
        ),
    )
    for factor, group, k in itertools.product(*FACTORS)
}
SPECS |= {
    f"capacity-dynamic-max-{most}-{group}": layers(
        GQA, moe("topk(2)", balance=BOTH, beside=f"capacity = dynamic(max = {most}); group = {group}")
    )
    for most in ("0.5", "1.25")
    for group in ("sequence", "batch")
}
SPECS["capacity-eval"] = layers(
    GQA, moe("topk(2)", experts=4, balance=BOTH, beside="capacity = factor(0.5, eval = 1.5)")
)
SPECS["capacity-dynamic"] = layers(GQA, moe("topk(2)", balance=BOTH, beside="capacity = dynamic()"))
SPECS |= {f"{word}-ffn": layers(GQA, f"ffn = {word}(32)") for word in ("geglu", "relu", "relu2", "silu")}
SPECS |= {
    f"{word}-experts": layers(GQA, moe("topk(2)", body=f"{word}(20)", balance=BOTH))
    for word in ("geglu", "relu", "relu2", "silu")
}
GATES = (1, 2, 3), ("softmax", "sigmoid"), ("before", "after"), ("raw", "normalized")
SPECS |= {
    f"topk-{k}-{score}-{order}-{weights}": layers(
        GQA,
        moe(
            f"topk({k}, score = {score}, order = {order}, normalize = {str(weights == 'normalized').lower()})",
            balance=BOTH,
        ),
    )
    for k, score, order, weights in itertools.product(*GATES)
}


def in_pairs(prefix: str, *axes: Sequence[object]) -> set[str]:
    """Names of the combinations in which every two values of two axes meet."""
    rows = covering(*map(len, axes))
    return {"-".join([prefix, *(str(axis[place]) for axis, place in zip(axes, row, strict=True))]) for row in rows}


FAST = {
    *(name for name in SPECS if not name.startswith(("topk-", "capacity-0", "capacity-1"))),
    *in_pairs("topk", *GATES),
    *in_pairs("capacity", *FACTORS),
}


def pair(spec: Spec, dtype: torch.dtype = torch.float64) -> tuple[PlanModule, PlainModel]:
    """moec's model and the handwritten one with the same parameters, so large that no term is negligible."""
    ours, plain = reference(spec, dtype=dtype), PlainModel(spec, dtype)
    spread(ours)
    copy_parameters(ours, plain)
    return ours, plain


def batch(ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(VOCAB, (2, BATCH, SEQUENCE), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = -100
    return tokens, labels


@pytest.mark.parametrize("name", some(list(SPECS), FAST))
def test_reference_equals_the_handwritten_model(name: str) -> None:
    spec = small_spec(SPECS[name], depth=4 if "mixed" in name else 2)
    require_same(*pair(spec), *batch())


@pytest.mark.parametrize("norm", ["layer_norm", "layer_norm(eps = 1e-3, bias = false)"])
@pytest.mark.parametrize("embedding", ["tokens()", "tokens(tied = true)", "tokens(positions = learned, tied = true)"])
def test_norms_and_embeddings(norm: str, embedding: str) -> None:
    require_same(*pair(small_spec(SPECS["switch-loss"], norm=norm, embedding=embedding)), *batch())


def test_learned_positions_serve_shorter_sequences_too() -> None:
    ours, plain = pair(small_spec(SPECS["mha"], embedding="tokens(positions = learned)"))
    tokens, labels = (ids[:, :5].contiguous() for ids in batch())
    require_same(ours, plain, tokens, labels)


def test_no_label_ignored() -> None:
    require_same(*pair(small_spec(SPECS["switch-loss"])), *batch(ignored=0.0))


def test_evaluation_has_a_capacity_of_its_own() -> None:
    ours, plain = pair(small_spec(SPECS["capacity-eval"]))
    tokens, labels = batch()
    trained = ours(tokens).logits
    require_same(ours.eval(), plain.eval(), tokens, labels)
    evaluated = ours(tokens).logits
    assert (evaluated - trained).abs().max() > 1e-3
    assert torch.equal(ours.train()(tokens).logits, trained)


def test_every_label_ignored_leaves_the_balance_terms() -> None:
    ours, plain = pair(small_spec(SPECS["switch-loss"]))
    tokens, labels = batch(ignored=1.1)
    assert (labels == -100).all()
    output, (_, loss) = ours(tokens, labels), plain(tokens, labels)
    torch.testing.assert_close(output.loss, loss, rtol=1e-10, atol=1e-10)
    assert loss > 0.1


def test_an_expert_never_used() -> None:
    """Expert 0 scores 0, and of experts 1 and 2, which are opposites, one always scores more."""
    ours, plain = pair(small_spec(layers(GQA, moe("topk(1, order = after)", experts=3, balance="switch_loss(0.3)"))))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("gate.weight"):
                parameter[0], parameter[2] = 0, -parameter[1]
    copy_parameters(ours, plain)
    tokens, labels = batch()
    require_same(ours, plain, tokens, labels)
    assert [int(counts[0]) for counts in ours.expert_counts.values()] == [0, 0]
    unused = [parameter.grad[0] for name, parameter in ours.named_parameters() if "experts" in name]
    assert all((gradient == 0).all() for gradient in unused)


@pytest.mark.parametrize(
    "name",
    [
        "gqa-rope",
        "qk-norm-head",
        "qk-norm-projection",
        "topk-2-softmax-before-normalized",
        "gelu-experts",
        "geglu-experts",
        "shared-gated",
        "residual",
    ],
)
def test_bf16_is_as_close_to_float64_as_handwritten_bf16(name: str) -> None:
    """The two round in different places, so each is compared with the same weights in float64."""
    spec = small_spec(SPECS[name], dtype="bf16")
    ours, plain = pair(spec, torch.bfloat16)
    exact = PlainModel(spec, torch.float64)
    copy_parameters(ours, exact)
    tokens, labels = batch()
    with torch.no_grad():
        output, (logits, loss), (truth, true_loss) = ours(tokens, labels), plain(tokens, labels), exact(tokens, labels)
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32
    median = [float((values.double() - truth).abs().median()) for values in (output.logits, logits)]
    assert median[0] <= 1.5 * median[1], f"ours {median[0]:.2e}, handwritten {median[1]:.2e}"
    torch.testing.assert_close(output.loss.double(), true_loss, rtol=0.05, atol=0)
    torch.testing.assert_close(loss.double(), true_loss, rtol=0.05, atol=0)


def test_the_public_reference_is_this_reference() -> None:
    spec = small_spec(SPECS["switch-loss"])
    tokens, labels = batch()
    output = moec.reference(spec, seed=3)(tokens, labels)
    torch.testing.assert_close(output.loss, reference(spec, seed=3)(tokens, labels).loss, rtol=0, atol=0)
