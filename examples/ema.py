"""An exponential moving average of the weights, and evaluation with it: torch's `AveragedModel` around the model.

`torchrun --nproc-per-node 4 examples/ema.py`, or without torchrun on one process: `--ranks 1`.

Every rank averages its parts without communication. The copy uses the job's process groups.
"""

from __future__ import annotations

import argparse

import torch
from text import load_text, random_windows
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import moec

MODEL = """
model "averaged" {
  vocab = 256; dim = 64; depth = 2; dtype = fp32
  layers {
    attention = mha(heads = 4, rope = rope())
    moe { experts = 8 * swiglu(128); gate = topk(2, normalize = true); balance = [switch_loss(0.01)] }
  }
}
cluster "laptop" { device = cpu; level "process" { size = RANKS } }
train { batch = 16; sequence = 64; optimizer = adamw(lr = 8e-3) }
"""
DECAY = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes that torchrun starts (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    plan = moec.compile(MODEL.replace("RANKS", str(options.ranks)))
    text = load_text(None, 64)
    with moec.launch(plan) as job:
        model = job.build()
        optimizer = job.optimizer(model)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        batches = random_windows(text.train, 16, 64, seed=0)
        for _, batch in zip(range(options.steps), batches, strict=False):
            job.step(model, *(rows.chunk(job.data_size)[job.data_rank] for rows in batch))
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)

        held_out = next(random_windows(text.held_out, 16, 64, seed=1))
        mine = [rows.chunk(job.data_size)[job.data_rank] for rows in held_out]
        with torch.no_grad():
            losses = {"the last weights": model.eval()(*mine).loss, "their average": average.eval()(*mine).loss}
        if job.rank == 0:
            for name, loss in losses.items():
                print(f"held-out loss with {name}: {float(loss):.3f}")


if __name__ == "__main__":
    main()
