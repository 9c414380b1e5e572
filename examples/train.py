"""Trains a byte-level plan: `torchrun --nproc-per-node 4 examples/train.py tiny.plan`.

A template for training scripts. moec requires that every rank makes the same calls in the same order, with its part of
each batch. Learning rate, data, end of training and output are up to the script.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import Text, TextError, even_windows, load_text, random_windows, unigram_entropy
from torch import Tensor, nn

import moec

WARM_UP, FINAL_LR = 0.05, 0.02
"""The learning rate rises over this fraction of the training, then falls along a cosine to this fraction of itself."""

MAX_NORM = 1.0
REPORT_EVERY = 10
EVALUATED_WINDOWS = 1024
SAMPLE_BYTES, TEMPERATURE = 300, 0.7


def main() -> None:
    options = parse_options()
    plan = moec.load(options.plan)
    if plan.spec.train is None:
        sys.exit(f"{options.plan}: its file has no `train` block, which says the batch and the sequence")
    with moec.launch(plan) as job:
        try:
            text = load_text(options.data, plan.spec.train.sequence)
        except TextError as error:
            sys.exit(f"--data: {error}" if job.rank == 0 else 1)
        model = job.build()
        steps = train(job, model, text, options)
        result = evaluate(job, model, text) | {"steps": steps}
        sample = write_sample(job, model, text.held_out, plan.spec.train.sequence)
    if job.rank == 0:
        print_result(result, sample)
        if options.result:
            Path(options.result).write_text(json.dumps(result))


def train(job: moec.Job, model: nn.Module, text: Text, options: argparse.Namespace) -> int:
    """Trains for at most so many steps and seconds; returns the number of steps."""
    settings = job.plan.spec.train
    optimizer = job.optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    started = time.monotonic()
    if job.rank == 0:
        print(f"training on {text.description}", flush=True)
    with (
        job.metrics(options.metrics, tensorboard=options.tensorboard, every=REPORT_EVERY) as metrics,
        job.progress() as progress,
    ):
        for step, batch in enumerate(random_windows(text.train, settings.batch, settings.sequence, seed=0)):
            done = agreed_fraction(step / options.steps, (time.monotonic() - started) / options.seconds)
            if done >= 1:
                return step
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate(done)

            tokens, labels = (share_of(rows, job) for rows in batch)
            loss = job.step(model, tokens, labels)
            norm = job.clip_grad_norm_(model, MAX_NORM, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()

            bits = loss / math.log(2)
            loads = job.expert_loads(model) if step % REPORT_EVERY == 0 else None  # on every rank, or on none
            progress.step(loss, grad_norm=norm, optimizer=optimizer, loads=loads, done=done, bits_per_byte=bits)
            metrics.step(model, loss, grad_norm=norm, optimizer=optimizer, bits_per_byte=bits)
    raise AssertionError("random windows do not end")


def share_of(rows: Tensor, job: moec.Job) -> Tensor:
    """This rank's part of a batch."""
    return rows.chunk(job.data_size)[job.data_rank]


def agreed_fraction(*shares: float) -> float:
    """The fraction of the training done, by the first rank's clock: all ranks must stop at the same step."""
    done = torch.tensor(max(shares))
    dist.broadcast(done, src=0)
    return float(done)


def learning_rate(done: float) -> float:
    """The learning rate as a fraction of the file's."""
    if done < WARM_UP:
        return (done + WARM_UP / 20) / WARM_UP
    falling = (done - WARM_UP) / (1 - WARM_UP)
    return FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * falling)) / 2


@torch.no_grad()
def evaluate(job: moec.Job, model: nn.Module, text: Text) -> dict[str, float]:
    """Bits per byte of the model, and the entropy of byte frequencies, on the same held-out text."""
    nats, seen = 0.0, []
    settings = job.plan.spec.train
    model.eval()
    for tokens, labels in even_windows(text.held_out, EVALUATED_WINDOWS, settings.batch, settings.sequence):
        # In evaluation the cross-entropy alone, already over the labels of all ranks.
        nats += float(model(share_of(tokens, job), share_of(labels, job)).loss) * labels.numel()
        seen.append(labels)
    model.train()
    labels = torch.cat(seen)
    return {
        "bytes": labels.numel(),
        "bits_per_byte": nats / labels.numel() / math.log(2),
        "unigram_bits_per_byte": unigram_entropy(labels),
    }


@torch.no_grad()
def write_sample(job: moec.Job, model: nn.Module, held_out: Tensor, sequence: int) -> tuple[bytes, bytes]:
    """A prompt, the first bytes of the held-out text, and how the model goes on.

    Every rank writes one, the same, for a token's experts may be on any of them.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = held_out[: sequence // 2].long()
    written = prompt
    model.eval()
    for _ in range(SAMPLE_BYTES):
        recent = written[-sequence:]
        # Always a full sequence, which tensor parallelism divides: later tokens do not change earlier ones.
        output = model(F.pad(recent, (0, sequence - len(recent)))[None])
        logits = job.whole_logits(output)[0, len(recent) - 1].float()
        following = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
        written = torch.cat([written, following])
    return bytes(prompt.tolist()), bytes(written[len(prompt) :].tolist())


def print_result(result: dict[str, float], sample: tuple[bytes, bytes]) -> None:
    model, unigram = result["bits_per_byte"], result["unigram_bits_per_byte"]
    print(f"\nafter {result['steps']:,} steps, over {result['bytes']:,} predictions of held-out bytes:")
    print(f"  the model          {model:.3f} bits per byte")
    print(f"  unigram entropy    {unigram:.3f} bits per byte")
    print(f"  ratio              {model / unigram:.3f}")
    print("\na sample (after ▸ the model's own):\n")
    print("  " + "▸".join(map(printable, sample)).replace("\n", "\n  "))


def printable(text: bytes) -> str:
    characters = text.decode(errors="replace").expandtabs(4)
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in characters)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", help="a plan folder, from `moec compile`")
    parser.add_argument("--data", help="a text file or a folder of them (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=3000, help="at most so many steps (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="train for at most so long")
    parser.add_argument("--metrics", help="append figures of training to this file of JSON lines")
    parser.add_argument("--tensorboard", help="write them to this folder for TensorBoard (pip install tensorboard)")
    parser.add_argument("--result", help="write the held-out figures to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
