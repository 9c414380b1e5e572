"""docs/language.md, "What the numbers are": written out in plain PyTorch, and compared with the unsharded model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule

EPS, THETA, WINDOW, SCALE = 1e-3, 100.0, 3, 2.5
TEXT = f"""\
model "m" {{
  vocab = 12; dim = 8; depth = 2; context = 6; dtype = fp32; norm = rms(eps = {EPS})
  layers {{
    attention = gqa(heads = 4, kv_heads = 2, head_dim = 4, rope = rope(theta = {THETA}), qk_norm = head,
                    bias = all, window = {WINDOW})
    moe {{
      experts = 4 * swiglu(3, bias = true); gate = GATE
      shared = geglu(5, gated = true); residual = gelu(4, bias = true)
      balance = [switch_loss(0.5), z_loss(0.25)]
    }}
  }}
}}
train {{ batch = 3; sequence = 6 }}
"""
GATES = {
    "softmax": "topk(2)",
    "softmax, normalized": f"topk(2, normalize = true, scale = {SCALE})",
    "softmax of the best": "topk(2, order = after)",
    "sigmoid": f"topk(2, score = sigmoid, scale = {SCALE})",
    "sigmoid, normalized": "topk(2, score = sigmoid, normalize = true)",
    "sigmoid of the best": "topk(2, score = sigmoid, order = after)",
}
TOKENS = torch.randint(12, (3, 6), generator=torch.Generator().manual_seed(4))


def model_of(gate: str, rope: str = "") -> PlanModule:
    """The unsharded model with random parameters, also where new ones are zeros or ones."""
    text = TEXT.replace("GATE", gate).replace(f"theta = {THETA}", f"theta = {THETA}{rope}")
    model = reference(load_text(text).unwrap(), seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6)
    return model


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, interleaved: bool) -> Tensor:
    """Rotary positions of x [B, S, heads, 4]: pair i turns by place · theta^(−2 i / 4)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def attention(x: Tensor, p: dict[str, Tensor], interleaved: bool) -> Tensor:
    q, k, v = (torch.einsum("bsd,hed->bshe", x, p[f"{n}.weight"]) + p[f"{n}.bias"] for n in "qkv")
    q, k = (turned(rms(each, p[f"{n}_norm.weight"]), interleaved) for n, each in (("q", q), ("k", k)))
    k, v = (each.repeat_interleave(2, 2) for each in (k, v))  # neighbouring query heads share a key
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / math.sqrt(4)
    far = torch.arange(6)[:, None] - torch.arange(6)
    scores = scores.masked_fill((far < 0) | (far >= WINDOW), -math.inf)  # itself, and WINDOW − 1 before it
    mixed = torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), v)
    return torch.einsum("bshe,dhe->bsd", mixed, p["o.weight"]) + p["o.bias"]


def gated(x: Tensor, up: Tensor, down: Tensor, act: object, bias: Tensor | None = None) -> Tensor:
    """`up` [2, hidden, dim]: the gate's rows, then those of up."""
    gate, value = torch.einsum("...d,phd->p...h", x, up) + (0 if bias is None else bias[:, None, None])
    return (act(gate) * value) @ down.T  # type: ignore[operator]


def weights_of(logits: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The probabilities of balance terms, and the choices with their weights."""
    scores = logits.sigmoid() if name.startswith("sigmoid") else logits.softmax(-1)
    chosen = scores.topk(2, -1).indices
    w = scores.gather(-1, chosen)
    if name.endswith("normalized"):
        w = w / w.sum(-1, keepdim=True)
    if name == "softmax of the best":
        w = logits.gather(-1, chosen).softmax(-1)
    if f"scale = {SCALE}" in GATES[name]:
        w = w * SCALE
    return scores / scores.sum(-1, keepdim=True), w, chosen


def mixture(x: Tensor, p: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    logits = x @ p["gate.weight"].T
    probabilities, w, chosen = weights_of(logits, name)
    routed = torch.zeros_like(x)
    for expert in range(4):
        ours = (p[f"experts.{part}"][expert] for part in ("up.weight", "down.weight", "up.bias", "down.bias"))
        up, down, up_bias, down_bias = ours
        y = gated(x, up, down, F.silu, up_bias) + down_bias
        routed = routed + y * (w * (chosen == expert)).sum(-1, keepdim=True)
    dense = F.gelu(x @ p["residual.up.weight"][0].T + p["residual.up.bias"][0]) @ p["residual.down.weight"].T
    dense = dense + p["residual.down.bias"]
    coefficients = (x @ p["coefficient.weight"].T + p["coefficient.bias"]).softmax(-1)
    shared = gated(x, p["shared.up.weight"], p["shared.down.weight"], F.gelu)
    shared = shared * (x @ p["shared_gate.weight"].T).sigmoid()
    counts = F.one_hot(chosen, 4).sum((1, 2)).double() / chosen[0].numel()
    switch = (4 * (counts * probabilities.mean(1)).sum(-1)).mean()  # groups of one size: their mean
    z = logits.logsumexp(-1).square().mean()
    y = coefficients[..., :1] * routed + coefficients[..., 1:] * dense + shared
    return y, 0.5 * switch + 0.25 * z


def written_out(model: PlanModule, name: str, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Logits and balance terms of `TOKENS`."""
    p = {key: value.detach() for key, value in model.named_parameters()}

    def inside(prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in p.items() if key.startswith(prefix)}

    x, aux = p["embedding.weight"][TOKENS], torch.zeros((), dtype=torch.float64)
    for layer in range(2):
        at = f"layers.{layer}."
        x = x + attention(rms(x, p[f"{at}attention_norm.weight"]), inside(f"{at}attention."), interleaved)
        y, terms = mixture(rms(x, p[f"{at}ffn_norm.weight"]), inside(f"{at}moe."), name)
        x, aux = x + y, aux + terms
    return rms(x, p["norm.weight"]) @ p["head.weight"].T, aux


@pytest.mark.parametrize("name", GATES)
def test_a_model_is_what_its_page_says(name: str) -> None:
    model = model_of(GATES[name])
    labels = TOKENS.roll(-1, 1).clone()
    labels[0, 3:] = -100
    out = model(TOKENS, labels)
    logits, aux = written_out(model, name)
    torch.testing.assert_close(out.logits.detach(), logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.aux_loss.detach(), aux, rtol=1e-9, atol=1e-9)
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)  # labels are not shifted
    torch.testing.assert_close(out.loss.detach(), entropy + aux, rtol=1e-9, atol=1e-9)


def test_interleaved_rotary_positions_turn_neighbours() -> None:
    model = model_of("topk(2)", ", interleaved = true")
    torch.testing.assert_close(
        model(TOKENS).logits.detach(), written_out(model, "softmax", interleaved=True)[0], rtol=1e-9, atol=1e-9
    )


def test_a_batch_without_a_valid_label_has_a_cross_entropy_of_zero() -> None:
    model = model_of("topk(2)")
    out = model(TOKENS, torch.full_like(TOKENS, -100))
    torch.testing.assert_close(out.loss.detach(), out.aux_loss.detach(), rtol=0, atol=0)


def test_new_parameters_are_normal_and_only_matrices_decay() -> None:
    plan = compile_source(TEXT.replace("GATE", "topk(2)"))
    for name, parameter in plan.parameters.items():
        into_the_stream = name.endswith((".o.weight", ".down.weight"))
        if name.endswith("bias"):
            assert (parameter.init.kind, parameter.decays) == ("zeros", False)
        elif "norm" in name:
            assert (parameter.init.kind, parameter.decays) == ("ones", False)
        else:
            std = 0.02 / math.sqrt(2 * 2) if into_the_stream else 0.02
            assert (parameter.init.kind, parameter.decays) == ("normal", True)
            assert parameter.init.std == pytest.approx(std)


def test_a_balance_term_is_the_mean_over_groups_by_their_real_tokens() -> None:
    text = TEXT.replace("GATE", "topk(2)").replace("dtype = fp32;", "dtype = fp32; embedding = tokens(padding = 0);")
    text = text.replace("depth = 2", "depth = 1").replace(", z_loss(0.25)", "")
    model = reference(load_text(text).unwrap(), seed=1, dtype=torch.float64)
    tokens = TOKENS.clamp(min=1)
    tokens[0, 2:] = 0
    aux = [model(part, part).aux_loss.item() for part in (tokens, tokens[:1], tokens[1:])]
    assert aux[0] == pytest.approx((2 * aux[1] + 12 * aux[2]) / 14, rel=1e-12)
    assert abs(aux[0] - (aux[1] + 2 * aux[2]) / 3) > 1e-6


def test_the_sequences_of_a_rank_are_those_of_its_tp_group() -> None:
    """`group = rank`: results depend on the data-parallel ranks, and not on `tp`."""
    cluster = 'cluster "c" {{ device = cpu; level "node" {{ size = {ranks} }} }}\nparallel {{ tp = {tp}; ep = 1 }}\n'
    text = TEXT.replace("GATE", "topk(2); group = rank; capacity = factor(1.0)").replace("batch = 3", "batch = 4")
    tokens = torch.cat([TOKENS, TOKENS[:1]])
    losses = []
    for ranks, tp in ((2, 1), (4, 2), (4, 1)):
        spec = load_text(text + cluster.format(ranks=ranks, tp=tp)).unwrap()
        losses.append(reference(spec, seed=1, dtype=torch.float64)(tokens, tokens).loss.item())
    assert losses[0] == losses[1] != losses[2]
