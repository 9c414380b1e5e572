"""Trains the vision MoE of vision.moe on scikit-learn's handwritten digits, and counts the held-out ones it reads.

`python examples/vision.py`, or `torchrun --nproc-per-node 2 examples/vision.py` (or 4): each rank has a part of the
experts and of each step's images. Needs scikit-learn, which ships the digits: 1,797 images of 8 × 8 pixels.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import moec

HELD_OUT = 297
WARM_UP = 0.1
"""The part of training in which the learning rate rises."""


class Digits(NamedTuple):
    """Images fp32 `[n, 1, 8, 8]` from −1 to 1, and their classes int64 `[n]`."""

    images: Tensor
    labels: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: %(default)s)")
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # the matrices are small: a second thread would mostly wait
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    plan = moec.compile(Path(__file__).with_suffix(".moe"), ranks=ranks)
    assert plan.spec.train is not None
    batch = plan.spec.train.batch
    trained, held_out = load_digits()
    steps = epochs * (len(trained.images) // batch)
    with moec.launch(plan) as job:
        model = job.build()
        optimizer = job.optimizer(model)
        peak = optimizer.param_groups[0]["lr"]
        for step, (images, labels) in enumerate(batches(trained, batch, epochs)):
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate(step / steps)
            mine = slice(job.data_rank * batch // job.data_size, (job.data_rank + 1) * batch // job.data_size)
            loss = job.step(model, images[mine], labels[mine])
            job.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0 and step % (steps // min(5, steps)) == 0:
                print(f"step {step:4}   loss {loss:.3f}")
        model.eval()
        with torch.no_grad():  # every rank reads all of them: experts are on other ranks
            found = model(held_out.images).logits.argmax(-1)
        share = float((found == held_out.labels).float().mean())
        if job.rank == 0:
            print(f"held out: {share:.1%} of {HELD_OUT} images are right")


def load_digits() -> tuple[Digits, Digits]:
    """The digits to train on and those held out, in a fixed random order."""
    from sklearn import datasets

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 8 - 1  # pixels are 0 to 16
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    return Digits(images[HELD_OUT:], labels[HELD_OUT:]), Digits(images[:HELD_OUT], labels[:HELD_OUT])


def batches(digits: Digits, batch: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches, in another order in each epoch; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for part in torch.randperm(len(digits.images), generator=generator).split(batch):
            if len(part) == batch:
                yield digits.images[part], digits.labels[part]


def learning_rate(done: float) -> float:
    """The fraction of the highest learning rate: a linear rise, then half a cosine."""
    return done / WARM_UP + 0.01 if done < WARM_UP else 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


if __name__ == "__main__":
    main()
