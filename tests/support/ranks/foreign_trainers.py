"""Trainings of layers of `moec.layer` in DistributedDataParallel, `fully_shard`, accelerate and the Trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.plans import layer_text
from support.ranks.hosts import DIM, SEQUENCE, Transformer, in_fsdp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import moec

RATE, MAX_NORM = 0.3, 0.05
"""Of SGD, which a factor of its gradients changes; the norm is above MAX_NORM in every step."""
STEPS, PER_RANK = 3, 2
TEXT = layer_text(ranks=None, dim=DIM)


class Regressor(nn.Module):
    """A transformer with its loss, as the Trainer wants it; keeps the batches that it was given."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = Transformer(make)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen.append((x, labels))
        return {"loss": (self.body(x) - labels).square().mean() + self.body.aux_loss()}


def sharded() -> Regressor:
    """Its mixtures are layers over all ranks, if there are some."""
    return Regressor(lambda number: moec.layer(TEXT, seed=number))


def ignoring_experts(model: nn.Module) -> nn.Module:
    """`model`, whose experts DistributedDataParallel will leave alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, moec.expert_parameters(model))
    return model


def examples() -> list[dict[str, Tensor]]:
    """As many sequences and targets as the ranks take in all steps."""
    generator = torch.Generator().manual_seed(5)
    count = STEPS * PER_RANK * int(os.environ["WORLD_SIZE"])
    return [
        dict(zip(("x", "labels"), torch.randn(2, SEQUENCE, DIM, generator=generator).unbind(0), strict=True))
        for _ in range(count)
    ]


@dataclass
class Trained:
    """What a rank saw of a training: the model, its batches, and the norms before clipping."""

    model: Regressor
    norms: list[float] = field(default_factory=list)


Clip = Callable[[nn.Module], Tensor]


def by_moec(model: nn.Module) -> Tensor:
    """The norm."""
    return moec.clip_grad_norm_(model, MAX_NORM)


def by_torch(model: nn.Module) -> Tensor:
    """The norm."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


EARLY_NORM, EARLY_SCALE = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_
"""As a script imports them, before any layer is made."""


def by_parts_of_torch(model: nn.Module) -> Tensor:
    """The norm, by torch's two functions that its clipping consists of."""
    norm = EARLY_NORM([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    EARLY_SCALE(model.parameters(), MAX_NORM, norm)
    return norm


CLIPS: dict[str, Clip | None] = {"torch": by_torch, "torch's parts": by_parts_of_torch, "moec": by_moec, "host": None}
"""None: the host's own clipping."""


# ---- hosts ---------------------------------------------------------------------------------------------------------


def loop(model: nn.Module, inner: Regressor, clip: Clip, max_steps: int) -> Trained:
    """A plain loop over this rank's part of the examples."""
    found = Trained(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
    mine = examples()[dist.get_rank() :: dist.get_world_size()]
    for step in range(max_steps):
        batch = mine[step * PER_RANK :][:PER_RANK]
        model(*(torch.stack([each[name] for each in batch]) for name in ("x", "labels")))["loss"].backward()
        found.norms.append(float(clip(inner)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def ddp(make: Callable[[], Regressor], clip: Clip | None, folder: Path) -> Trained:
    """By hand."""
    inner = make()
    begin_gloo()
    return loop(DistributedDataParallel(ignoring_experts(inner)), inner, clip or by_torch, STEPS)


def fsdp(make: Callable[[], Regressor], clip: Clip | None, folder: Path) -> Trained:
    """By hand."""
    inner = make()
    begin_gloo()
    in_fsdp(inner.body)
    return loop(inner, inner, clip or by_torch, STEPS)


def accelerate(make: Callable[[], Regressor], clip: Clip | None, folder: Path) -> Trained:
    """As accelerate's documentation has it."""
    from accelerate import Accelerator

    found = Trained(ignoring_experts(make()))
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(found.model.parameters(), lr=RATE, foreach=False)
    loader = torch.utils.data.DataLoader(examples(), batch_size=PER_RANK)
    model, optimizer, loader = accelerator.prepare(found.model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        if clip is None:
            found.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
        else:
            found.norms.append(float(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def trainer(make: Callable[[], Regressor], clip: Clip | None, folder: Path) -> Trained:
    """`Trainer.train()`, with its own clipping or with one in a callback."""
    from transformers import Trainer, TrainerCallback

    inner = make()
    found = Trained(ignoring_experts(inner))

    class Clips(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if clip is not None:
                found.norms.append(float(clip(named["model"])))

    made = Trainer(
        model=inner,
        args=arguments(folder, 0.0 if clip else MAX_NORM),
        train_dataset=examples(),
        callbacks=[Clips()],
    )
    made.train()
    logged = [float(entry["grad_norm"]) for entry in made.state.log_history if "grad_norm" in entry]
    if clip is None:
        found.norms = logged
    return found


def arguments(folder: Path, max_grad_norm: float = MAX_NORM) -> Any:
    """Of the Trainer. They make the process group."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=PER_RANK,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=max_grad_norm,
        remove_unused_columns=False,
        label_names=["labels"],
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def begin_gloo() -> None:
    """Makes the default process group, unless there is one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


HOSTS: dict[str, Callable[[Callable[[], Regressor], Clip | None, Path], Trained]] = {
    "DDP": ddp,
    "fully_shard": fsdp,
    "accelerate": accelerate,
    "Trainer": trainer,
}


@contextmanager
def as_under_torchrun() -> Iterator[None]:
    """Without the warnings of these libraries, and with the number of threads that torchrun sets."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget_accelerate()


def forget_accelerate() -> None:
    """accelerate keeps one state for a process, and the pool's processes run many jobs."""
    import sys

    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
