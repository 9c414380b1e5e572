"""Layers of moec in a plain PyTorch transformer: `torchrun --nproc-per-node 4 examples/drop_in.py [--fsdp]`.

Two feed-forwards of the transformer are mixtures of experts (ffn.moe), sharded over torchrun's ranks. The
model is wrapped in DistributedDataParallel, or with `--fsdp` in `fully_shard`, and trained for a few steps. Before
that the script compares its gradients with those of the same model in one process over the whole batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moec

FFN = Path(__file__).parent / "ffn.moe"
DIM, HEADS, VOCAB, SEQUENCE, SEQUENCES, STEPS = 64, 4, 256, 32, 4, 20
"""SEQUENCES is per rank."""

CLOSE = 1e-4
"""Bound of a gradient's difference over its largest element: fp32 sums in another order."""


class Block(nn.Module):
    """Attention and a feed-forward, each normed and with a residual."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """Four blocks; the second and the fourth have a mixture of experts as feed-forward."""

    def __init__(self, mixture: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(
            Block(mixture(number) if number % 2 else nn.Sequential(nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, DIM)))
            for number in range(4)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over this rank's tokens, plus the balance terms of the mixtures, which are over all ranks already."""
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
    mixtures = [module for module in model.modules() if isinstance(module, moec.MoeLayer)]
    return loss + sum(mixture.aux_loss for mixture in mixtures)


def wrap(model: nn.Module, *, fsdp: bool) -> nn.Module:
    """The model in its host, which must ignore the experts: ranks have different ones."""
    experts = moec.expert_parameters(model)
    if not fsdp:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block, ignored_params=set(experts.values()))
    return fully_shard(model, ignored_params=set(experts.values()))


def largest_difference(model: nn.Module, whole: nn.Module) -> float:
    """Largest difference of this rank's gradients from the unsharded model's, over each gradient's largest element."""
    held = next(module for module in model.modules() if isinstance(module, moec.MoeLayer)).local_experts
    experts, found = moec.expert_parameters(model), 0.0
    for name, parameter in model.named_parameters():
        gradient, wanted = parameter.grad, whole.get_parameter(name).grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if name in experts:
            wanted = wanted[held.start : held.stop]
        found = max(found, float((gradient - wanted).abs().max() / wanted.abs().max()))
    return found


def compare_and_train(*, fsdp: bool) -> bool:
    """Trains the model in its host; whether its gradients had been the unsharded model's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Layers with the same seed would have the same initial values.
    model = Transformer(lambda number: moec.layer(FFN, seed=number))
    hosted = wrap(model, fsdp=fsdp)
    batch = torch.randint(VOCAB, (ranks * SEQUENCES, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    mine = batch.chunk(ranks)[rank]

    loss_of(hosted, mine).backward()
    whole = Transformer(lambda number: moec.reference(FFN, seed=number))
    loss_of(whole, batch).backward()
    difference = torch.tensor(largest_difference(model, whole))
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    equal = float(difference) < CLOSE
    if rank == 0:
        held = sum(parameter.numel() for parameter in moec.expert_parameters(model).values())
        every = sum(parameter.numel() for parameter in moec.expert_parameters(whole).values())
        print(f"{ranks} ranks, {'fully_shard' if fsdp else 'DDP'}: {held} of {every} expert elements on each")
        verdict = "equal" if equal else "DIFFER from"
        print(f"gradients {verdict} the unsharded model's (largest difference {difference:.1e})")

    # Two groups: `fully_shard` makes DTensors of all but the experts, and a group's tensors must be of one kind.
    experts = moec.expert_parameters(model)
    dense = [parameter for name, parameter in model.named_parameters() if name not in experts]
    optimizer = torch.optim.AdamW([{"params": dense}, {"params": list(experts.values())}], lr=3e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(hosted, mine)
        loss.backward()
        moec.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    return equal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true", help="fully_shard in the place of DistributedDataParallel")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    equal = compare_and_train(fsdp=options.fsdp)
    # Only now that no model in DDP is left: one that outlives its group frees it, and can wait for ever (torch 2.13).
    dist.destroy_process_group()
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
