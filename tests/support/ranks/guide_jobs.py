"""Functions that test_training_guide.py runs on ranks: the snippets of docs/training.md as they stand."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.ranks.contract import Gradients, distance, parts_of
from support.ranks.torch_optimizers import torch_optimizers
from support.ranks.training import gradients_of
from torch import Tensor, nn
from torch.optim import Optimizer

import moec
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule
from moec.runtime.weights.masters import local_part

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")


@cache
def moe_file() -> str:
    """The file of the page, on a laptop."""
    file, _ = re.findall(r"```moe\n(.*?)```", PAGE, re.DOTALL)
    return str(file)


@cache
def file_for_nodes() -> str:
    """The file of the page, changed as "Several nodes" says."""
    _, cluster = re.findall(r"```moe\n(.*?)```", PAGE, re.DOTALL)
    (batch,) = re.findall(r"set `(batch = \d+)`", PAGE)
    text = re.sub(r"^cluster \"laptop\".*\n", cluster, moe_file(), flags=re.MULTILINE)
    return re.sub(r"batch = \d+", batch, text)


@cache
def sections() -> dict[str, list[str]]:
    """The Python snippets of each section, by its heading."""
    found = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        if code := re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            found[section.splitlines()[0]] = code
    return found


Ran = dict[str, Any]
"""The names of a script that has run, and `result`, what its `train` returned."""


def run(
    section: str = "", number: int = 0, *, change: Callable[[Ran], None] = lambda names: None,
    begin: Callable[[PlanModule], None] = lambda model: None,
) -> Ran:  # fmt: skip
    """Runs a snippet, or the page's first loop, between the first and the last part of the page's script.

    `change` may replace names after the first part, such as `batch`; `begin` gets the model before `train`.
    """
    top, middle, end = sections()["A script in three parts"]
    code = sections()[section][number] if section else middle
    names: Ran = {}
    exec(top, names)  # noqa: S102 - our own page
    change(names)
    exec(code, names)  # noqa: S102
    train = names["train"]

    def kept(job: Job, model: PlanModule, optimizer: Optimizer) -> None:
        begin(model)
        names["result"] = train(job, model, optimizer)
        names["gradients"] = gradients_of(model)

    names["train"] = kept
    exec(end, names)  # noqa: S102
    return names


def unsharded(ran: Ran) -> PlanModule:
    """The page's model in plain PyTorch, with the weights that the script began with."""
    model = moec.reference(ran["plan"], seed=0)
    assert isinstance(model, PlanModule)
    return model


def parts(model: nn.Module) -> Gradients:
    return {name: local_part(p).detach() for name, p in model.named_parameters()}


def off(ran: Ran, model: nn.Module) -> float:
    """The largest difference of this rank's parameters from an unsharded model's, over the largest."""
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    return distance(parts(ran["model"]), parts_of(wanted, ran["job"]))


def off_in_gradients(ran: Ran, model: nn.Module) -> float:
    return distance(ran["gradients"], parts_of(gradients_of(model), ran["job"]))


def plain_training(
    ran: Ran, steps: int, *, max_norm: float = 0.0, rate: Callable[[int], float] = lambda step: 1.0,
    trained: Callable[[str], bool] = lambda name: True, after: Callable[[nn.Module], None] = lambda model: None,
) -> PlanModule:  # fmt: skip
    """The same training in plain PyTorch: torch's AdamW over the whole batch, without a job."""
    model = unsharded(ran)
    spec = ran["plan"].spec.train.optimizer
    optimizers = torch_optimizers(spec, dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    for step in range(steps):
        model(*ran["batch"](step)).loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = spec.lr * rate(step)
            optimizer.step()
        model.zero_grad()
        after(model)
    return model


# ---- a function for each section: what the test looks at ------------------------------------------------


def script() -> tuple[list[str], float]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ran = run()
    return said.getvalue().splitlines(), off(ran, plain_training(ran, 20, max_norm=1.0))


def data() -> tuple[list[Tensor], Tensor, int]:
    """The tokens of every step, those that there are, and this rank's part."""
    seen: list[Tensor] = []
    ran = run("Data", begin=lambda model: model.register_forward_pre_hook(lambda _, given: seen.append(given[0])))
    return seen, ran["batch"](0)[0], ran["job"].data_rank


def the_loss() -> tuple[list[float], float]:
    """The three numbers of the page, and the loss in plain PyTorch."""
    ran = run("The loss")
    with torch.no_grad():
        plain = unsharded(ran).eval()(*ran["batch"](0)).loss
    return [float(number) for number in ran["result"]], float(plain)


def smoothed() -> tuple[float, float, float]:
    """The loss, its value in plain PyTorch, and how far the gradients are from plain PyTorch's."""
    ran = run("A loss of your own", 0)
    model, (tokens, labels) = unsharded(ran), ran["batch"](0)
    weights = 1 / (1 + tokens.float())
    output = model(tokens)
    each = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=0.1)
    loss = (each * weights.flatten()).sum() / weights[labels != -100].sum() + output.aux_loss
    loss.backward()
    return float(ran["result"]), float(loss.detach()), off_in_gradients(ran, model)


def reinforced() -> tuple[float, float, float]:
    ran = run("A loss of your own", 1)
    model, (tokens, labels) = unsharded(ran), ran["batch"](0)
    output = model(tokens)
    valid = labels != -100
    logprobs = output.logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss = -(logprobs * (tokens % 3 - 1))[valid].sum() / valid.sum() + output.aux_loss
    loss.backward()
    return float(ran["result"]), float(loss.detach()), off_in_gradients(ran, model)


def by_hand() -> float:
    ran = run("A loss of your own", 2)
    model = unsharded(ran)
    model(*ran["batch"](0)).loss.backward()
    return off_in_gradients(ran, model)


def accumulated() -> float:
    ran = run("Accumulation")
    return off(ran, plain_training(ran, 1))


def clipped() -> tuple[float, float, float, float]:
    """The first norm, that of plain PyTorch, and how far the weights are from plain PyTorch's, clipped and not."""
    ran = run("Gradient clipping")
    model = unsharded(ran)
    model(*ran["batch"](0)).loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    with_clipping, without = plain_training(ran, 4, max_norm=0.5), plain_training(ran, 4)
    return float(ran["result"][0]), float(norm), off(ran, with_clipping), off(ran, without)


def scheduled() -> tuple[list[float], float]:
    ran = run("Learning-rate schedules")
    return ran["result"], off(ran, plain_training(ran, 12, rate=ran["cosine"]))


def evaluated() -> tuple[float, float, float, bool]:
    """The loss, the cross-entropy of all three batches at once in plain PyTorch, the weights' distance, the mode."""
    ran = run("Evaluation")
    model = plain_training(ran, 4).eval()
    tokens, labels = (torch.cat(parts) for parts in zip(*map(ran["batch"], range(100, 103)), strict=True))
    with torch.no_grad():
        plain = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
    return float(ran["result"]), float(plain), off(ran, model), ran["model"].training


def frozen() -> tuple[float, bool]:
    """How far the weights are from plain PyTorch's, and whether exactly the mixtures have changed."""
    ran = run("Freezing")
    before = parts_of(dict(unsharded(ran).named_parameters()), ran["job"])
    moved = {name for name, part in parts(ran["model"]).items() if not torch.equal(part, before[name])}
    return off(ran, plain_training(ran, 3, trained=lambda name: ".moe." in name)), moved == {
        name for name in before if ".moe." in name
    }


def averaged() -> tuple[float, float, float, float]:
    """How far the average and the weights are from those made by hand, and the averages' losses."""
    by_hand: dict[str, Tensor] = {}

    def average(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            now = parameter.detach().clone()
            by_hand[name] = 0.9 * by_hand[name] + 0.1 * now if name in by_hand else now

    ran = run("A moving average of the weights")
    model = plain_training(ran, 5, after=average)
    distance_of_weights = off(ran, model)
    loss, module = ran["result"]
    difference = distance(parts(module), parts_of(by_hand, ran["job"]))
    model.load_state_dict(by_hand)
    with torch.no_grad():
        plain = model.eval()(*ran["batch"](100)).loss
    with moec.launch(ran["plan"], device="cpu") as job:
        loaded = job.build(seed=9)
        assert job.load("averages/5", loaded) == {"updates": 5}
        assert all(torch.equal(a, b) for a, b in zip(parts(loaded).values(), parts(module).values(), strict=True))
    return difference, distance_of_weights, float(loss), float(plain)


def logged() -> float:
    ran = run("Logging")
    return off(ran, plain_training(ran, 6, max_norm=1.0))


class KilledError(Exception):
    """What ends a run in the middle."""


def resumed(folder: str) -> tuple[bool, list[str], float]:
    return stopped_and_resumed(folder, lambda **change: run("Saving and resuming", **change))


def completed(folder: str) -> tuple[bool, list[str], float]:
    return stopped_and_resumed(folder, lambda **change: run("A complete loop", **change), max_norm=1.0)


def stopped_and_resumed(folder: str, once: Callable[..., Ran], max_norm: float = 0.0) -> tuple[bool, list[str], float]:
    """Whether a run that was stopped in step 5 and began again ends with the bits of one that was not; its
    checkpoints; how far its weights are from plain PyTorch's. The runs are in the folders `whole` and `stopped`."""

    def stopping(ran: Ran) -> None:
        batch = ran["batch"]

        def until_the_fifth(step: int) -> tuple[Tensor, Tensor]:
            if step == 4:
                raise KilledError
            return batch(step)

        ran["batch"] = until_the_fifth

    with contextlib.chdir(os.path.join(folder, "whole")):
        whole = once()
    with contextlib.chdir(os.path.join(folder, "stopped")):
        with contextlib.suppress(KilledError):
            once(change=stopping)
        assert sorted(os.listdir("checkpoints")) == ["2", "4"]
        again = once()
        names = sorted(os.listdir("checkpoints"))
    pairs = zip(parts(whole["model"]).values(), parts(again["model"]).values(), strict=True)
    halved = plain_training(again, 6, max_norm=max_norm, rate=lambda step: 0.5 ** (step // 4))
    return all(torch.equal(a, b) for a, b in pairs), names, off(again, halved)
