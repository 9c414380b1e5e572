"""Fine-tuning with the balance term on: each loss is that of a plain loop over transformers' model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface.decoders import config_of
from huggingface.equal import VOCAB, made
from support.combinations import diagonals
from support.ranks.gloo_pool import GlooPool
from support.session import extent
from torch import Tensor
from transformers import PreTrainedModel

import moec
from moec.codegen.plan import Plan
from moec.grammar.printer import to_text

STEPS, SEQUENCES, LENGTH = 20 if extent.everything else 8, 8, 12
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")


def batch(step: int) -> Tensor:
    """The sequences of all ranks, and the token behind each."""
    return torch.randint(1, VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def plan_of(folder: Path, ranks: int) -> Plan:
    """A plan of the imported model, with the balance term of which the import tells."""
    with pytest.warns(UserWarning, match="MOE0904") as said:
        text = to_text(moec.from_hf(folder))
    told = re.search(r"`(balance = \[.*?\])` and `(group = batch)` in `moe`", str(said[0].message))
    assert told is not None
    text = re.sub(r"( gate = topk\(.*?\))(?=[; ]|\n)", rf"\1; {told[1]}; {told[2]}", text)
    assert text.count(told[1]) == text.count("experts = ")
    text = text.replace("size = 1 }", f"size = {ranks} }}")
    train = f"train {{ sequence = {LENGTH}; batch = {SEQUENCES} }}"
    return moec.compile(f"{text}\nparallel {{ ep = {ranks} }}\n{train}\n")


def losses_here(plan: Plan, folder: Path, parts: int) -> list[float]:
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        moec.load_hf(model, folder)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        losses = []
        for step in range(STEPS):
            own = batch(step).chunk(job.data_size)[job.data_rank]
            losses.append(job.step(model, own[:, :-1], own[:, 1:], microbatches=parts).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses


def losses_there(model: PreTrainedModel, ranks: int, parts: int) -> list[float]:
    """A plain loop. A micro-batch has the same sequences as those of all ranks' micro-batches together."""
    optimizer = torch.optim.AdamW(model.train().parameters(), **ADAMW)
    losses = []
    for step in range(STEPS):
        of_ranks = [part.chunk(parts) for part in batch(step).chunk(ranks)]
        loss = 0.0
        for micro_batch in map(torch.cat, zip(*of_ranks, strict=True)):
            tokens, labels = micro_batch[:, :-1], micro_batch[:, 1:].contiguous()
            output = model(tokens, labels=tokens, shift_labels=labels)
            (output.loss / parts).backward()
            loss += output.loss.item() / parts
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("family", "parts", "ranks"), diagonals(FAMILIES, (1, 4), (1, 2)))
def test_each_loss_is_theirs(family: str, parts: int, ranks: int, gloo: GlooPool, tmp_path: Path) -> None:
    keys = {**config_of(family), "output_router_logits": True, "router_aux_loss_coef": 0.1}
    theirs = made(family, **keys)
    theirs.save_pretrained(tmp_path)
    plan = plan_of(tmp_path, ranks)
    expected = losses_there(theirs, ranks, parts)
    assert max(expected) - min(expected) > 0.1
    for found in gloo.run(ranks, losses_here, plan, tmp_path, parts):
        assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) < 1e-5
