"""A rank of a job under torchrun that kills itself in the middle of a step: test_watch.py runs it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from support.plans import moe_plan

import moec

with moec.launch(moe_plan(ranks=2, ep=2), device="cpu") as job:
    model = job.build()
    plain = dist.all_to_all_single

    def deadly(*arguments: Any, **options: Any) -> Any:
        """The other rank waits for the rows of a layer when this rank dies."""
        if job.rank == 1 and len(arguments) > 2:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **options)

    tokens = torch.zeros(2, 8, dtype=torch.int64)
    job.step(model, tokens, tokens)
    dist.all_to_all_single = deadly
    job.step(model, tokens, tokens)
sys.exit("a rank that was killed went on")
