"""A plain PyTorch transformer whose feed-forwards are layers of moec, and its gradients in several hosts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.plans import layer_text
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moec
from moec.passes.ir import local_slices
from moec.runtime.host.layer import MoeLayer

DIM, SEQUENCE = 16, 6
SEQUENCES = 2
"""Per rank."""


class Block(nn.Module):
    """Attention, then a mixture; each normed and with a residual."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.ffn(self.norms[1](x))


class Transformer(nn.Module):
    """Two blocks."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(make(number)) for number in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def aux_loss(self) -> Tensor:
        """The balance terms of all layers."""
        return sum((layer.aux_loss for layer in layers_of(self)), start=torch.zeros(()))


def layers_of(model: nn.Module) -> Iterator[MoeLayer]:
    """Its mixtures."""
    return (module for module in model.modules() if isinstance(module, MoeLayer))


def batch(ranks: int) -> tuple[Tensor, Tensor]:
    """The inputs of all ranks and their targets."""
    generator = torch.Generator().manual_seed(5)
    x, wanted = torch.randn(2, ranks * SEQUENCES, SEQUENCE, DIM, generator=generator).unbind(0)
    return x, wanted


def whole_gradients(text: str, ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """Of the unsharded model over the whole batch: every gradient, and the balance terms."""
    model = Transformer(lambda number: moec.reference(text, seed=number))
    x, wanted = batch(ranks)
    loss = (model(x) - wanted).square().mean() + model.aux_loss()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, [float(layer.aux_loss.detach()) for layer in layers_of(model)]


Hosted = tuple[Callable[[Tensor], Tensor], Callable[[], None]]
"""A model in its host, and what sums the gradients where the host does not."""
Host = Callable[[Transformer], Hosted]


def in_ddp(model: Transformer) -> Hosted:
    """The model in DistributedDataParallel."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, moec.expert_parameters(model))
    return DistributedDataParallel(model), lambda: None


def in_compiled_ddp(model: Transformer) -> Hosted:
    """`torch.compile` around DistributedDataParallel, without the warnings of Dynamo while it compiles."""
    hosted, reduce = in_ddp(model)
    compiled = torch.compile(hosted, backend="aot_eager")

    def quietly(x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compiled(x)

    return quietly, reduce


def in_fsdp(model: Transformer) -> Hosted:
    """Each block, then the rest of the model, under `fully_shard`."""
    experts = set(moec.expert_parameters(model).values())
    for block in model.blocks:
        fully_shard(block, ignored_params=experts)
    fully_shard(model, ignored_params=experts)
    return model, lambda: None


def summed_by_hand(model: Transformer) -> Hosted:
    """A host that sums the gradients of its ranks."""
    experts = moec.expert_parameters(model)

    def reduce() -> None:
        for name, parameter in model.named_parameters():
            if name not in experts:
                dist.all_reduce(parameter.grad)

    return model, reduce


def worst_error(host: Host, options: dict[str, Any], steps: int = 1, reduction: str = "mean") -> dict[str, float]:
    """As one rank: the largest error of each gradient, and of `aux_loss`, against the unsharded model's.

    Over the largest element of that gradient. `steps` backward passes, whose gradients add up.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = layer_text(ranks=None, dim=DIM, **options)
    model = Transformer(lambda number: moec.layer(text, seed=number, reduction=reduction))
    hosted, reduce = host(model)
    x, wanted = (part.chunk(ranks)[rank] for part in batch(ranks))
    for _ in range(steps):
        loss = (hosted(x) - wanted).square().mean()
        if reduction == "sum":
            loss = loss / ranks
        (loss + model.aux_loss()).backward()
        aux_losses = [float(layer.aux_loss.detach()) for layer in layers_of(model)]
    reduce()
    expected, expected_aux = whole_gradients(text, ranks)
    errors = gradient_errors(model, {name: whole * steps for name, whole in expected.items()})
    errors |= {
        f"aux_loss of {i}": abs(a - b) / b for i, (a, b) in enumerate(zip(aux_losses, expected_aux, strict=True))
    }
    return errors


def gradient_errors(model: Transformer, expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each gradient of this rank, over the largest element of the whole one."""
    plan = next(layers_of(model))._home.plan
    experts, errors = moec.expert_parameters(model), {}
    for name, parameter in model.named_parameters():
        got, whole = parameter.grad, expected[name]
        assert got is not None, name
        got = got.full_tensor() if isinstance(got, DTensor) else got
        index: Any = ...
        if name in experts:
            data = plan.parameters["layers.0.moe." + name.partition(".ffn.")[2]]
            index = local_slices(data.shape, data.layout, plan.meshes[data.mesh], dist.get_rank())
            assert parameter.shape == whole[index].shape
        errors[name] = float((got - whole[index]).abs().max() / whole.abs().max())
    return errors


def clipped(host: Host, max_norm: float) -> dict[str, float]:
    """As one rank: the norm before, the unsharded model's, and the largest error of a gradient after clipping."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = layer_text(ranks=None, dim=DIM, ep=2)
    model = Transformer(lambda number: moec.layer(text, seed=number))
    hosted, _ = host(model)
    x, wanted = (part.chunk(ranks)[rank] for part in batch(ranks))
    ((hosted(x) - wanted).square().mean() + model.aux_loss()).backward()
    norm = moec.clip_grad_norm_(model, max_norm)
    expected, _ = whole_gradients(text, ranks)
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    scale = min(1.0, max_norm / float(whole))
    errors = gradient_errors(model, {name: gradient * scale for name, gradient in expected.items()})
    return {"norm": float(norm), "whole": float(whole), "error": max(errors.values())}
