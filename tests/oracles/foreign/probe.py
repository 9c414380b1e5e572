"""What a `.moe` gate gives: the combine weights and the loss of `moec.reference`, made visible.

The router is the identity, so tokens are logits; expert e gives the unit vector e, so what the mixture gives is its
combine weights. In float64.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from oracles.foreign.routing import Routing
from oracles.plain_philox import SEED, STEP
from torch import Tensor

from moec.driver import reference
from moec.runtime.host.layer import MoeLayer
from moec.runtime.model.module import PlanModule

EXPERTS = "experts = {experts} * relu(1, bias = true)"


def layer_weights(moe: str, logits: Tensor, *, training: bool = True, bias: Tensor | None = None) -> Routing:
    """Of a `layer` with these lines in its `moe`, for logits [batch, sequence, experts]; `bias` is of the router.

    Of logits in bf16 the layer and its router are of bf16.
    """
    experts, narrow = logits.shape[-1], logits.dtype == torch.bfloat16
    lines = f"dtype = {'bf16; router_dtype = model' if narrow else 'fp32'}"
    layer = reference(
        f'layer "probe" {{ dim = {experts}; {lines}; moe {{ {EXPERTS.format(experts=experts)}; {moe} }} }}',
        dtype=None if narrow else torch.float64,
    )
    assert isinstance(layer, MoeLayer)
    given = {"gate.weight": torch.eye(experts), "experts.down.bias": torch.eye(experts)}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(bias if name == "gate.bias" and bias is not None else given.get(name, torch.zeros(())))
    weights = layer.train(training)(logits)
    return Routing(weights.flatten(0, -2), layer.aux_loss)


class ModelProbe:
    """As `layer_weights`, of a `model` of one layer: for what needs steps, places of tokens or padding.

    The stream of a token is its logits, zeros in which experts write, and a number that gives all tokens the same
    root mean square, so that norms divide by numbers that are known. `real` [batch, sequence] are the tokens that are
    no padding; `noise` times the logits is what `noisy_topk` learned. `bias` is the buffer of `online`.
    """

    def __init__(self, moe: str, logits: Tensor, *, real: Tensor | None = None, noise: float = 0.0) -> None:
        (batch, sequence, self.experts), self.dim = logits.shape, 2 * logits.shape[-1] + 1
        logits = logits.detach()
        size = 4.0 * self.dim * float(logits.square().sum(-1).max() + 1)
        rest = (size - logits.square().sum(-1, keepdim=True)).sqrt()
        stream = torch.cat([logits, torch.zeros_like(logits), rest], -1).flatten(0, 1)
        self.tokens = torch.arange(1, len(stream) + 1).view(batch, sequence)
        if real is not None:
            self.tokens = torch.where(real, self.tokens, 0)
        self.last = rest.flatten(0, 1)
        model = reference(
            f"""
            model "probe" {{
              vocab = {max(len(stream) + 1, self.dim)}; dim = {self.dim}; depth = 1; dtype = fp32
              norm = rms(eps = 1e-30); embedding = tokens({"" if real is None else "padding = 0"})
              layers {{ attention = mha(heads = 1); moe {{ {EXPERTS.format(experts=self.experts)}; {moe} }} }}
            }}
            cluster "here" {{ device = cpu; level "process" {{ size = 1 }} }}
            train {{ batch = {batch}; sequence = {sequence} }}
            """,
            dtype=torch.float64,
        )
        assert isinstance(model, PlanModule)
        self.model, gate = model, torch.eye(self.experts, self.dim, dtype=torch.float64) * (size / self.dim) ** 0.5
        given: Mapping[str, Tensor] = {
            "head.weight": torch.eye(*model.get_parameter("head.weight").shape),
            "layers.0.moe.gate.weight": gate,
            "layers.0.moe.gate.noise.weight": gate * noise,
            "layers.0.moe.experts.down.bias": torch.eye(self.experts, self.dim).roll(self.experts, -1),
        }
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.ones(()) if "norm" in name else given.get(name, torch.zeros(())))
            model.get_parameter("embedding.weight")[1 : len(stream) + 1] = stream
        model.set(seed=SEED, step=STEP)

    @property
    def bias(self) -> Tensor:
        """What `online` adds to scores that choose: [experts]."""
        return self.model.get_buffer("layers.0.moe.gate.bias")

    def route(self, *, training: bool = True) -> Routing:
        """A forward pass."""
        output = self.model.train(training)(self.tokens)
        found = output.logits.flatten(0, 1)[:, : self.dim]
        weights = found[:, self.experts : 2 * self.experts] * (self.last / found[:, -1:])
        return Routing(weights, output.aux_loss)
