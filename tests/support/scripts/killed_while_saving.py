"""A rank of a job that saves, and is killed while it saves again: test_checkpoint_schedule.py runs it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from support.ranks.checkpoints import plan_of, train

import moec
from moec.runtime.checkpoint import description

torch.set_num_threads(1)
folder = Path(sys.argv[1])
with moec.launch(plan_of({"ranks": 1, "ep": 1}), device="cpu") as job:
    model = job.build(seed=1)
    optimizer = job.optimizer(model)
    train(job, model, optimizer, 0, 1)
    job.save(folder / "1", model, optimizer).wait()
    train(job, model, optimizer, 1, 1)

    def deadly(*arguments: Any) -> None:
        """The shard is written, the index is not."""
        os.kill(os.getpid(), signal.SIGKILL)

    description.write_file = deadly
    job.save(folder / "2", model, optimizer).wait()
sys.exit("a rank that was killed went on")
