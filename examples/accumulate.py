"""Gradient accumulation: a batch in micro-batches, three ways that give the same gradient.

`torchrun --nproc-per-node 4 examples/accumulate.py`, or without torchrun on one process: `--ranks 1`.

Labels are masked unevenly, as in instruction tuning: the mean of micro-batches' means would have another gradient.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

import moec

MODEL = """
model "accumulating" {
  vocab = 256; dim = 64; depth = 2; dtype = fp32
  layers {
    attention = mha(heads = 4, rope = rope())
    moe { experts = 8 * swiglu(128); gate = topk(2, normalize = true); balance = [switch_loss(0.01)] }
  }
}
cluster "laptop" { device = cpu; level "process" { size = RANKS } }
train { batch = 16; sequence = 64 }
"""
PARTS = 4
ROUNDING = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes that torchrun starts (default: %(default)s)")
    plan = moec.compile(MODEL.replace("RANKS", str(parser.parse_args().ranks)))
    with moec.launch(plan) as job:
        model = job.build()
        tokens, labels = (ids.chunk(job.data_size)[job.data_rank] for ids in a_batch())

        # 1. The whole batch at once, if memory allows.
        job.step(model, tokens, labels)
        at_once = take_gradients(model)

        # 2. moec splits the batch. Gradients are summed over the ranks once, at the end.
        job.step(model, tokens, labels, microbatches=PARTS)
        by_moec = take_gradients(model)

        # 3. In a custom loop: every loss is divided by the number of valid labels of all micro-batches.
        with job.accumulate(model, *labels.tensor_split(PARTS)):
            for some_tokens, some_labels in zip(tokens.tensor_split(PARTS), labels.tensor_split(PARTS), strict=True):
                model(some_tokens, some_labels).loss.backward()
        by_hand = take_gradients(model)

        for way, gradients in (("moec", by_moec), ("hand", by_hand)):
            difference = distance(gradients, at_once)
            if job.rank == 0:
                print(f"micro-batches by {way}: largest difference {difference:.1e} of the largest gradient")
            if difference > ROUNDING:
                sys.exit(f"rank {job.rank}: micro-batches by {way} give another gradient")


def a_batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels; in the first half of the sequences only the last four labels count."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (16, 65), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:8, :-4] = -100
    return tokens[:, :-1], labels


def take_gradients(model: nn.Module) -> list[Tensor]:
    """Returns this rank's parts of the gradients, and clears them."""
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    model.zero_grad()
    return gradients


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    largest = max(float(gradient.abs().max()) for gradient in others)
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True)) / largest


if __name__ == "__main__":
    main()
