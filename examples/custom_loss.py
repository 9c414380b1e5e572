"""A custom loss: a student learns from a teacher's logits; the teacher runs another plan in the same process.

`torchrun --nproc-per-node 4 examples/custom_loss.py`

The student runs at tp 2 × ep 2, the teacher at ep 4 without tensor parallelism. Each job has its own process groups.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from text import load_text, random_windows
from torch import Tensor

import moec

MODEL = """
model "NAME" {
  vocab = 256; dim = DIM; depth = 2; dtype = fp32
  layers {
    attention = mha(heads = 4, rope = rope())
    moe { experts = 8 * swiglu(DIM); gate = topk(2, normalize = true); balance = [switch_loss(0.01)] }
  }
}
cluster "laptop" { device = cpu; level "process" { size = 4 } }
train { batch = 16; sequence = 64; optimizer = adamw(lr = 8e-3) }
"""
STUDENT = MODEL.replace("NAME", "student").replace("DIM", "32") + "parallel { tp = 2; ep = 2 }"
TEACHER = MODEL.replace("NAME", "teacher").replace("DIM", "64") + "parallel { ep = 4 }"
TEMPERATURE = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of each training (default: %(default)s)")
    steps = parser.parse_args().steps
    text = load_text(None, 64)
    with (
        moec.launch(moec.compile(TEACHER)) as teacher_job,
        moec.launch(moec.compile(STUDENT)) as job,
    ):
        teacher, student = teacher_job.build(), job.build()
        optimizer = teacher_job.optimizer(teacher)
        for _, batch in zip(range(steps), random_windows(text.train, 16, 64, seed=0), strict=False):
            teacher_job.step(teacher, *(mine(rows, teacher_job) for rows in batch))
            optimizer.step()
            optimizer.zero_grad()
        teacher.eval().requires_grad_(False)

        optimizer = job.optimizer(student)
        for step, (tokens, labels) in zip(range(steps), random_windows(text.train, 16, 64, seed=1), strict=False):
            # Each rank of the teacher has different sequences; in the student two ranks have the same.
            targets = teachers_logits(teacher_job, teacher, tokens, job)
            loss = job.step(
                student, mine(tokens, job), mine(labels, job), loss=distillation, inputs={"targets": targets}
            )
            optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0 and step % 20 == 0:
                print(f"step {step}: distillation loss {float(loss):.3f}")
        if job.rank == 0:
            print(f"step {steps}: distillation loss {float(loss):.3f}")


def mine(rows: Tensor, job: moec.Job) -> Tensor:
    """This rank's part of a batch."""
    return rows.chunk(job.data_size)[job.data_rank]


def teachers_logits(teacher_job: moec.Job, teacher: torch.nn.Module, tokens: Tensor, job: moec.Job) -> Tensor:
    """The teacher's logits of this rank's part of the student's batch: gathered from all ranks, then split again."""
    own = teacher_job.whole_logits(teacher(mine(tokens, teacher_job)))
    every = [torch.empty_like(own) for _ in range(teacher_job.data_size)]
    torch.distributed.all_gather(every, own)
    return mine(torch.cat(every), job)


def distillation(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """Half the cross-entropy of the next byte, half the teacher's (Hinton et al. 2015); a sum over tokens."""
    hard = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    soft = F.kl_div((logits / TEMPERATURE).log_softmax(-1), (targets / TEMPERATURE).softmax(-1), reduction="sum")
    return hard / 2 + soft * TEMPERATURE**2 / 2


if __name__ == "__main__":
    main()
