"""What ranks do with weights of Hugging Face."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import moec
from moec.codegen.plan import Plan
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.printer import model_text


def plan_of(folder: str, degrees: str, batch: int = 4, sequence: int = 24) -> Plan:
    """A plan of the folder's model for as many ranks as this job has."""
    return moec.compile(f"""{model_text(moec.from_hf(folder))}
        cluster "here" {{ device = cpu; level "process" {{ size = {os.environ["WORLD_SIZE"]} }} }}
        train {{ batch = {batch}; sequence = {sequence}; optimizer = sgd(lr = 0.1) }}
        parallel {{ {degrees} }}
    """)


def load_and_save(folder: str, degrees: str, saved: str, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of all tokens with the folder's weights, of this rank's sequences; and the weights saved again."""
    plan = plan_of(folder, degrees, batch=len(tokens))
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=7)
        moec.load_hf(model, folder)
        mine = tokens.chunk(job.data_size)[job.data_rank]
        model.eval()
        logits = job.whole_logits(model(mine)).detach()
        model_type = moec.from_hf(folder).model.name
        moec.save_hf(model, saved, model_type=model_type)
        return logits


def refused(folder: str, damaged: str, saved: str) -> list[str]:
    """What every rank says of weights that one rank alone cannot read, and of a name that is in use."""
    plan = plan_of(folder, "ep = 2")
    said = []
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        before = [parameter.detach().clone() for parameter in model.parameters()]

        def load(path: str) -> Any:
            return lambda: moec.load_hf(model, path)

        for act in (load(damaged if job.rank == 1 else folder), lambda: moec.save_hf(model, saved)):
            with pytest.raises(DiagnosticError) as error:
                act()
            said.append(str(error.value))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        moec.load_hf(model, folder)  # the ranks are still together
    return said


def load_other_files(one: str, other: str) -> str:
    """What every rank says where rank 1 has files of its own, with the same headers."""
    with moec.launch(plan_of(one, "ep = 2"), device="cpu") as job:
        model = job.build()
        with pytest.raises(DiagnosticError) as error:
            moec.load_hf(model, other if job.rank == 1 else one)
    return str(error.value)


def train_after_load(folder: str, degrees: str, tokens: torch.Tensor, optimizer_first: bool) -> float:
    """The loss after a step from the folder's weights, with the optimizer made before or after they are loaded."""
    plan = plan_of(folder, degrees, batch=len(tokens))
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model) if optimizer_first else None
        moec.load_hf(model, folder)
        optimizer = optimizer or job.optimizer(model)
        mine = tokens.chunk(job.data_size)[job.data_rank]
        for _ in range(2):
            loss = job.step(model, mine, mine.roll(-1, 1))
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)
