"""Generates text with a byte-level model: `python examples/generate.py --prompt "def main" --prompt "import "`.

The model is examples/tiny.moe, or the file that is given. It goes on from the last checkpoint in `--folder` and trains
up to `--steps` steps, on Python's standard library by default. Any number of processes that divides its batch will do,
such as `torchrun --nproc-per-node 4 examples/generate.py`. They write the same text.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from text import TextError, load_text, random_windows
from train import learning_rate, printable

import moec

TINY = Path(__file__).parent / "tiny.moe"
PROMPTS = ["def ", "import ", "    return self."]


def main() -> None:
    options = parse_options()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    plan = moec.load_for(ranks, moec.compile(options.file, ranks=ranks) if options.file == TINY else options.file)
    with moec.launch(plan) as job:
        model = job.build()
        train(job, model, options)
        prompts = [torch.tensor(list(prompt.encode())) for prompt in options.prompt or PROMPTS]
        started = time.monotonic()
        generated = model.generate(
            prompts,
            max_new_tokens=options.bytes,
            eos=ord("\n") if options.line else None,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            sequences=torch.arange(len(prompts)),  # every rank has the same prompts
        )
        seconds = time.monotonic() - started
    if job.rank == 0:
        for prompt, new in zip(prompts, generated, strict=True):
            print("▸".join(printable(bytes(ids.tolist())) for ids in (prompt, new)))
        print(f"\n{int(generated.lengths.sum())} new bytes in {seconds:.2f} s")


def train(job: moec.Job, model: torch.nn.Module, options: argparse.Namespace) -> None:
    """Trains from the last checkpoint, if there is one, up to so many steps, and saves a checkpoint."""
    settings, optimizer = job.plan.spec.train, job.optimizer(model)
    first = job.resume(options.folder, model, optimizer) if options.folder else 0
    if first >= options.steps:
        return
    try:
        text = load_text(options.data, settings.sequence)
    except TextError as error:
        sys.exit(f"--data: {error}" if job.rank == 0 else 1)
    if job.rank == 0:
        print(f"training on {text.description}", flush=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    batches = random_windows(text.train, settings.batch, settings.sequence, seed=first)
    for step, batch in zip(range(first, options.steps), batches, strict=False):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * learning_rate(step / options.steps)
        tokens, labels = (rows.chunk(job.data_size)[job.data_rank] for rows in batch)
        loss = job.step(model, tokens, labels)
        job.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if job.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if options.folder:
        job.checkpoint(options.folder, model, optimizer, every=1)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default=TINY, help="a .moe file or a plan, of bytes (default: tiny.moe)")
    parser.add_argument("--prompt", action="append", help="what to begin with; may be given several times")
    parser.add_argument("--bytes", type=int, default=80, help="at most so many new ones (default: %(default)s)")
    parser.add_argument("--line", action="store_true", help="end at the end of the line")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the best byte (default: %(default)s)")
    parser.add_argument("--top-k", type=int, help="draw from so many best bytes")
    parser.add_argument("--top-p", type=float, help="draw from the bytes with this much of the probability")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn bytes (default: %(default)s)")
    parser.add_argument("--folder", help="where checkpoints are; without it nothing is saved")
    parser.add_argument("--steps", type=int, default=300, help="train up to so many steps (default: %(default)s)")
    parser.add_argument("--data", help="a text file or a folder of them (default: Python's standard library)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
