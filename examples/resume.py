"""Training that survives a kill: torchrun starts the ranks again, and they go on from the last checkpoint.

`torchrun --nproc-per-node 4 --max-restarts 3 examples/resume.py --kill-at 25`: rank 1 kills itself after step 25 of the
first attempt. The losses are those of a run that is never killed. Any number of processes that divides the batch will
do, also another one after a restart. examples/resume.md has the output.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch

import moec

MODEL = """
model "resumed" {
  vocab = 256; dim = 64; depth = 2; dtype = fp32
  layers {
    attention = mha(heads = 4, rope = rope())
    moe { experts = 8 * swiglu(128); gate = topk(2, normalize = true, jitter = 0.01); balance = [switch_loss(0.01)] }
  }
}
cluster "laptop" { device = cpu; level "process" { size = 4 } }
train { batch = 16; sequence = 32; optimizer = adamw(lr = 3e-3) }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    parser.add_argument("--folder", default="checkpoints", help="where checkpoints are (default: %(default)s)")
    parser.add_argument("--kill-at", type=int, help="the step after which rank 1 kills itself, in the first attempt")
    options = parser.parse_args()
    plan = moec.load_for(int(os.environ.get("WORLD_SIZE", "1")), MODEL)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        first = job.resume(options.folder, model, optimizer)
        if job.rank == 0:
            print(f"attempt {attempt} on {job.world_size} ranks begins at step {first}", flush=True)
        for step in range(first, options.steps):
            tokens, labels = (part.chunk(job.data_size)[job.data_rank] for part in batch(step))
            loss = job.step(model, tokens, labels)
            job.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            job.checkpoint(options.folder, model, optimizer, every=options.every, keep=2)
            if job.rank == 0 and (step % 5 == 4 or step == first):
                print(f"step {step + 1}: loss {loss.item():.9f}", flush=True)
            if attempt == 0 and job.rank == 1 and step + 1 == options.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens and labels of a step: counting in steps of 1 to 4 from anywhere."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(256, (16, 1), generator=generator)
    strides = torch.randint(1, 5, (16, 1), generator=generator)
    windows = (starts + strides * torch.arange(33)) % 256
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


if __name__ == "__main__":
    main()
