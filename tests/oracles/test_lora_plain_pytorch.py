"""Mixtures of LoRA experts over a frozen feed-forward against their definition in plain PyTorch, in float64.

LoRAMoE (Dou et al. 2023, arXiv 2312.09979, section 3): `o = W₀x + α/r · Σᵢ ωᵢ(x) Bᵢ Aᵢ x`, with W₀ frozen. Here W₀ is a
whole feed-forward, and ω are the weights of the two best experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.driver import to_spec
from moec.runtime.host.reference import layer_reference, reference

ORACLE_OF = {
    "lora": "rank alpha",
    "train": "frozen",
}

DIM, HIDDEN, EXPERTS, RANK, ALPHA = 6, 10, 5, 2, 3.0
MOE = f"moe {{ shared = swiglu({HIDDEN}); experts = {EXPERTS} * lora({RANK}, alpha = {ALPHA}); gate = topk(2) }}"
CLUSTER = 'cluster "here" { device = cpu; level "process" { size = 1 } }'
BOUND = 1e-10


def lora_mixture(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """x [tokens, dim]; parameters by their names within the mixture."""
    gate, up = p["shared.up.weight"]
    y = (F.silu(x @ gate.T) * (x @ up.T)) @ p["shared.down.weight"].T
    scores = (x @ p["gate.weight"].T).softmax(-1)
    for token in range(len(x)):
        for expert in scores[token].topk(2).indices.tolist():
            a, b = p["experts.down.weight"][expert, 0], p["experts.up.weight"][expert]
            change = torch.zeros_like(y)
            change[token] = scores[token, expert] * (ALPHA / RANK) * (b @ (a @ x[token]))
            y = y + change
    return y


def drawn(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_layer_of_lora_experts_over_a_frozen_feed_forward_equals_its_definition():
    text = (
        f'layer "ffn" {{ dim = {DIM}; dtype = fp32; {MOE} }}\ntrain {{ batch = 1; sequence = 7; frozen = [shared] }}\n'
    )
    layer = layer_reference(to_spec(text + CLUSTER), dtype=torch.float64)
    plain: dict[str, Tensor] = {}
    for seed, (name, parameter) in enumerate(layer.named_parameters()):
        with torch.no_grad():
            parameter.copy_(drawn(parameter, seed))
        plain[name] = parameter.detach().clone().requires_grad_("shared" not in name)
    x = drawn(torch.empty(7, DIM), 100).requires_grad_()
    x_plain = x.detach().clone().requires_grad_()
    cotangent = drawn(x, 101)
    y, wanted = layer(x), lora_mixture(plain, x_plain)
    torch.testing.assert_close(y, wanted, rtol=0, atol=BOUND)
    (y * cotangent).sum().backward()
    (wanted * cotangent).sum().backward()
    torch.testing.assert_close(x.grad, x_plain.grad, rtol=0, atol=BOUND)
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == ("shared" in name), name
        torch.testing.assert_close(parameter.grad, plain[name].grad, rtol=0, atol=BOUND)


def test_gradients_flow_through_frozen_layers_to_what_is_before_them():
    """Of a model whose embedding alone trains, against the same model with every parameter training."""
    grads = []
    for words in ("", "; frozen = [attention, norms, experts, gate, shared, head]"):
        layers = f"layers {{ attention = mha(heads = 2); {MOE} }}"
        text = f'model "m" {{ vocab = 11; dim = {DIM}; depth = 2; dtype = fp32; {layers} }}\n{CLUSTER}\n'
        spec = to_spec(f"{text}train {{ batch = 2; sequence = 7{words} }}")
        model = reference(spec, dtype=torch.float64, seed=3)
        tokens = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
        loss = model(tokens, tokens.roll(-1, 1)).loss
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    every, only = grads
    assert only.keys() == {"embedding.weight"}
    torch.testing.assert_close(only["embedding.weight"], every["embedding.weight"], rtol=0, atol=BOUND)
