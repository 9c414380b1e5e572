"""A mixture with each kind of expert against its definition in plain PyTorch: results and all gradients in float64.

`layer` files, so that nothing but the mixture is compared. The definitions take moec's parameters by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moec.driver import to_spec
from moec.runtime.host.reference import layer_reference

ORACLE_OF = {
    "conv": "kernel",
    "linear": "bias gated",
    "lora": "rank alpha",
    "swiglu": "clamp alpha",
    "mixture": "name",
    "feedforward": "hidden bias",
    "experts": "count body",
}

Parameters = Mapping[str, Tensor]
Expert = Callable[[Parameters, int, Tensor], Tensor]
"""Of the parameters, the number of an expert and x [N, dim]."""

DIM, EXPERTS, K = 6, 5, 2
LAYER = """
layer "ffn" {{
  dim = 6; dtype = fp32
  moe {{ experts = {experts}; gate = topk(2, normalize = true); {beside} }}
}}
cluster "here" {{ device = cpu; level "process" {{ size = 1 }} }}
"""
BOUND = 1e-10


def swiglu(
    p: Parameters, prefix: str, x: Tensor, clamp: float | None, alpha: float | None, expert: int | None
) -> Tensor:
    """gpt-oss (arXiv 2508.10925, section 2.2): clamped halves, `g · sigmoid(alpha · g) · (u + 1)`."""
    of = {name: p[f"{prefix}.{name}"] for name in ("up.weight", "down.weight", "up.bias", "down.bias")}
    if expert is not None:
        of = {name: tensor[expert] for name, tensor in of.items()}
    gate, up = (x @ of["up.weight"][half].T + of["up.bias"][half] for half in (0, 1))
    if clamp is not None:
        gate, up = torch.where(gate > clamp, clamp, gate), up.clamp(-clamp, clamp)
    active = F.silu(gate) * up if alpha is None else gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
    return active @ of["down.weight"].T + of["down.bias"]


def swiglus(clamp: float | None, alpha: float | None) -> Expert:
    return lambda p, expert, x: swiglu(p, "experts", x, clamp, alpha, expert)


def mixed(p: Parameters, x: Tensor, expert: Expert) -> Tensor:
    """The experts' results, each times its weight: softmax scores of the two best experts, which sum to 1."""
    flat = x.flatten(0, -2)
    best, chosen = (flat @ p["gate.weight"].T).softmax(-1).topk(K)
    weights = best / best.sum(-1, keepdim=True)
    rows = [
        sum(w * expert(p, int(e), row[None])[0] for w, e in zip(of, each, strict=True))
        for row, of, each in zip(flat, weights, chosen, strict=True)
    ]
    return torch.stack(rows).view_as(x)


Case = tuple[str, str, Callable[[Parameters, Tensor], Tensor]]
"""The words for the experts, those beside, and the definition of y."""


def bounded(clamp: float | None, alpha: float | None) -> Case:
    given = f"bias = true, {f'clamp = {clamp}, ' if clamp else ''}{f'alpha = {alpha}' if alpha else ''}"
    return f"5 * swiglu(7, {given})", "", lambda p, x: mixed(p, x, swiglus(clamp, alpha))


def bounded_beside(p: Parameters, x: Tensor) -> Tensor:
    flat = x.flatten(0, -2)
    share = (flat @ p["coefficient.weight"].T + p["coefficient.bias"]).softmax(-1)
    result = mixed(p, x, swiglus(None, None)).flatten(0, -2) * share[:, :1]
    result = result + swiglu(p, "residual", flat, 0.4, None, None) * share[:, 1:]
    return (result + swiglu(p, "shared", flat, 0.5, 1.702, None)).view_as(x)


def linear(p: Parameters, prefix: str, x: Tensor, expert: int | None) -> Tensor:
    """One matrix and a bias."""
    weight, bias = p[f"{prefix}.weight"], p[f"{prefix}.bias"]
    return x @ (weight if expert is None else weight[expert]).T + (bias if expert is None else bias[expert])


def linear_beside(p: Parameters, x: Tensor) -> Tensor:
    flat = x.flatten(0, -2)
    share = (flat @ p["coefficient.weight"].T + p["coefficient.bias"]).softmax(-1)
    result = mixed(p, x, lambda p, e, x: linear(p, "experts", x, e)).flatten(0, -2) * share[:, :1]
    result = result + linear(p, "residual", flat, None) * share[:, 1:]
    gate = torch.sigmoid(flat @ p["shared_gate.weight"].T)
    return (result + linear(p, "shared", flat, None) * gate).view_as(x)


def lora(p: Parameters, prefix: str, x: Tensor, scale: float, expert: int | None) -> Tensor:
    """Hu et al. 2021, eq. 3: `B A x · alpha / r`."""
    a, b = p[f"{prefix}.down.weight"], p[f"{prefix}.up.weight"]
    return scale * ((b if expert is None else b[expert]) @ ((a if expert is None else a[expert, 0]) @ x.T)).T


def lora_beside(p: Parameters, x: Tensor) -> Tensor:
    flat = x.flatten(0, -2)
    share = (flat @ p["coefficient.weight"].T + p["coefficient.bias"]).softmax(-1)
    result = mixed(p, x, lambda p, e, x: lora(p, "experts", x, 8 / 3, e)).flatten(0, -2) * share[:, :1]
    result = result + lora(p, "residual", flat, 1.0, None) * share[:, 1:]
    return (result + lora(p, "shared", flat, 0.5 / 2, None)).view_as(x)


def of_parts(p: Parameters, expert: int, x: Tensor) -> Tensor:
    """Two swiglu experts, two low-rank ones, one linear one, in this order."""
    if expert < 2:
        return swiglu(p, "experts.0", x, None, None, expert)
    if expert < 4:
        return lora(p, "experts.1", x, 4 / 2, expert - 2)
    return linear(p, "experts.2", x, expert - 4)


PARTS = "[2 * swiglu(7, bias = true), 2 * lora(2, alpha = 4), 1 * linear(bias = true)]"


def conv(p: Parameters, prefix: str, window: Tensor, expert: int | None) -> Tensor:
    """Wu et al. 2019, section 2: convolutions without padding over window [N, 2 · K − 1, dim]; one position is left."""
    of = {name: p[f"{prefix}.{name}"] for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    if expert is not None:
        of = {name: tensor[expert] for name, tensor in of.items()}
    up, down = of["up.weight"].transpose(1, 2), of["down.weight"].transpose(1, 2)  # torch: [out, in, K]
    hidden = F.gelu(F.conv1d(window.transpose(1, 2), up, of["up.bias"]))
    return F.conv1d(hidden, down, of["down.bias"])[..., 0]


def window_of(x: Tensor, kernel: int) -> Tensor:
    """The token and those before it in its sequence: x [B, S, D] → [B · S, 2 · kernel − 1, D]."""
    size, found = 2 * kernel - 1, []
    for sequence in x:
        before = torch.cat([torch.zeros(size - 1, x.shape[2], dtype=x.dtype), sequence])
        found += [before[token : token + size] for token in range(x.shape[1])]
    return torch.stack(found)


def convolved(p: Parameters, x: Tensor, kernel: int) -> Tensor:
    """Routed by the token's vector, applied to its window."""
    flat, window = x.flatten(0, -2), window_of(x, kernel)
    best, chosen = (flat @ p["gate.weight"].T).softmax(-1).topk(K)
    weights = best / best.sum(-1, keepdim=True)
    rows = [
        sum(w * conv(p, "experts", window[t][None], int(e))[0] for w, e in zip(weights[t], chosen[t], strict=True))
        for t in range(len(flat))
    ]
    return (torch.stack(rows) + conv(p, "shared", window_of(x, 2), None)).view_as(x)


CASES: dict[str, Case] = {
    "conv": (
        "5 * conv(4, kernel = 3, bias = true)",
        "shared = conv(5, kernel = 2, bias = true)",
        lambda p, x: convolved(p, x, 3),
    ),
    "conv in places": (
        "5 * conv(4, kernel = 2, bias = true)",
        "shared = conv(5, kernel = 2, bias = true); capacity = dynamic()",
        lambda p, x: convolved(p, x, 2),
    ),
    "parts": (PARTS, "", lambda p, x: mixed(p, x, of_parts)),
    "parts in places": (PARTS, "capacity = dynamic()", lambda p, x: mixed(p, x, of_parts)),
    "lora": ("5 * lora(3, alpha = 8)", "residual = lora(4); shared = lora(2, alpha = 0.5)", lora_beside),
    "lora in places": (
        "5 * lora(3)",
        "capacity = dynamic()",
        lambda p, x: mixed(p, x, lambda p, e, x: lora(p, "experts", x, 1.0, e)),
    ),
    "linear": (
        "5 * linear(bias = true)",
        "residual = linear(bias = true); shared = linear(bias = true, gated = true)",
        linear_beside,
    ),
    "linear in places": (
        "5 * linear(bias = true)",
        "capacity = dynamic()",
        lambda p, x: mixed(p, x, lambda p, e, x: linear(p, "experts", x, e)),
    ),
    "clamp and alpha": bounded(0.5, 1.702),
    "clamp": bounded(0.3, None),
    "alpha": bounded(None, 0.7),
    "bounded dense paths": (
        "5 * swiglu(7, bias = true)",
        "residual = swiglu(3, clamp = 0.4, bias = true); shared = swiglu(4, clamp = 0.5, alpha = 1.702, bias = true)",
        bounded_beside,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_its_definition(name: str) -> None:
    experts, beside, definition = CASES[name]
    layer = layer_reference(to_spec(LAYER.format(experts=experts, beside=beside)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    parameters = dict(layer.named_parameters())
    x = torch.randn(3, 4, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    ours, theirs = layer(x), definition(parameters, x)
    assert (ours - theirs).abs().max() < BOUND
    given = [x, *(p for p in parameters.values() if p.requires_grad)]
    for own, other in zip(
        torch.autograd.grad(ours, given, grad), torch.autograd.grad(theirs, given, grad), strict=True
    ):
        assert other.abs().max() > 0
        assert (own - other).abs().max() < BOUND


def test_experts_equal_those_of_hugging_faces_gpt_oss() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(hidden_size=DIM, intermediate_size=7, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(4)
    experts = modeling.GptOssExperts(config).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    text = LAYER.format(experts="5 * swiglu(7, bias = true, clamp = 7.0, alpha = 1.702)", beside="")
    layer = layer_reference(to_spec(text), dtype=torch.float64)
    own = dict(layer.named_parameters())
    with torch.no_grad():  # theirs: [E, in, out], gate and up interleaved
        own["experts.up.weight"].copy_(experts.gate_up_proj.unflatten(2, (-1, 2)).permute(0, 3, 2, 1))
        own["experts.up.bias"].copy_(experts.gate_up_proj_bias.unflatten(1, (-1, 2)).transpose(1, 2))
        own["experts.down.weight"].copy_(experts.down_proj.transpose(1, 2))
        own["experts.down.bias"].copy_(experts.down_proj_bias)
    x = torch.randn(1, 9, DIM, generator=generator, dtype=torch.float64)
    best, chosen = (x[0] @ own["gate.weight"].T).softmax(-1).topk(K)
    theirs = experts(x[0], chosen, best / best.sum(-1, keepdim=True))
    assert (theirs.view_as(x) - layer(x)).abs().max() < 1e-6  # their weights of routes are float32 inside


NESTED = """
layer "inner" {{ moe {{ experts = 4 * swiglu(7, bias = true); gate = topk(2, {inner}) }} }}
layer "ffn" {{
  dim = 6; dtype = fp32
  moe {{ experts = 3 * mixture("inner"); gate = topk(2, {outer}); balance = [switch_loss(0.3)] }}
}}
cluster "here" {{ device = cpu; level "process" {{ size = 1 }} }}
"""


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("normalize = true", "normalize = true"),
        ("score = sigmoid", "order = after"),
        ("order = after, score = sigmoid", "score = sigmoid, normalize = true"),
    ],
)
def test_a_mixture_of_mixtures_equals_the_nested_sums(outer: str, inner: str) -> None:
    """Shazeer et al. 2017, appendix B, eq. 12: `y = Σᵢ Σⱼ G(x)ᵢ · Gᵢ(x)ⱼ · Eᵢⱼ(x)`."""
    layer = layer_reference(to_spec(NESTED.format(outer=outer, inner=inner)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    p = dict(layer.named_parameters())
    x = torch.randn(2, 3, DIM, generator=generator, dtype=torch.float64, requires_grad=True)

    def gate(logits: Tensor, how: str) -> dict[int, Tensor]:
        score = torch.sigmoid if "sigmoid" in how else lambda values: values.softmax(-1)
        kept = logits.topk(2).indices
        weights = score(logits[kept]) if "after" in how else score(logits)[kept]
        weights = weights / weights.sum() if "normalize" in how else weights
        return dict(zip(kept.tolist(), weights, strict=True))

    rows, chosen, scores = [], torch.zeros(2, 3, dtype=torch.float64), []
    for number, token in enumerate(x.flatten(0, 1)):
        logits = p["gate.weight"] @ token
        row = torch.zeros(DIM, dtype=torch.float64)
        for i, weight in gate(logits[:3], outer).items():
            chosen[number // 3, i] += 1 / 6
            for j, within in gate(logits[3 + 4 * i : 7 + 4 * i], inner).items():
                row = row + weight * within * swiglu(p, "experts", token[None], None, None, 4 * i + j)[0]
        rows.append(row)
        scored = logits[:3].sigmoid() if "sigmoid" in outer else logits[:3].softmax(-1)
        scores.append(scored / scored.sum())
    y, mean = torch.stack(rows).view_as(x), torch.stack(scores).view(2, 3, 3).mean(1)
    balance = 0.3 * 3 * (chosen * mean).sum(-1).mean()
    ours = layer(x)
    assert layer.aux_loss is not None
    assert (ours - y).abs().max() < BOUND
    assert (layer.aux_loss - balance).abs() < BOUND
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    given = [x, *p.values()]
    found = torch.autograd.grad((ours * grad).sum() + layer.aux_loss, given)
    for own, other in zip(found, torch.autograd.grad((y * grad).sum() + balance, given), strict=True):
        assert other.abs().max() > 0
        assert (own - other).abs().max() < BOUND
