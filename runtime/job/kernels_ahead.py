"""Compiles a plan's kernels when a job builds its model."""

from __future__ import annotations

import os

import torch

from moec.codegen.plan import Plan
from moec.runtime.backends import select
from moec.runtime.backends.torch import torch_backend
from moec.runtime.backends.triton.triton_tiles import runs_on


def compile_kernels_ahead(plan: Plan, device: torch.device) -> None:
    """Compiles the kernels of the plan's steps on `device`, so that no step waits for the compiler.

    Shows progress on stderr of each machine's first rank where it takes more than a second. Does nothing where plain
    torch runs the operators, and in Triton's interpreter, which compiles nothing.
    """
    target = runs_on(device)
    if target.type != "cuda" or select(target.type) is torch_backend:
        return
    from moec.runtime.backends.triton.triton_warm import Progress, compile_ahead

    progress = Progress(shows=os.environ.get("LOCAL_RANK", "0") == "0")
    progress.done(compile_ahead(plan, target, progress))
