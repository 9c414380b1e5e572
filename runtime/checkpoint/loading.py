"""Loads a checkpoint into a model, its optimizer and extras: every rank reads its part.

First every rank checks everything that it will read, and the ranks agree. Then they copy, without checking again: a
file that changes in between may go unnoticed, or raise after a part is loaded.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from moec.codegen.plan import Plan
from moec.runtime.checkpoint.content import EXTRAS, MODEL, RNG, random_states, require_optimizer
from moec.runtime.checkpoint.grid import Box
from moec.runtime.checkpoint.index import Entry
from moec.runtime.checkpoint.optimizer_state import OPTIONS, Plain, Target, plain_of, put_back, targets_of
from moec.runtime.checkpoint.parts import DTYPES, UnevenError, part_of
from moec.runtime.checkpoint.reading import Block, Checkpoint
from moec.runtime.checkpoint.trees import decode
from moec.runtime.errors import JobError
from moec.runtime.job.checks import Complaint, MustMatch
from moec.runtime.job.module import PlanModule
from moec.runtime.job.plan_names import parameters_by_name, states_by_name
from moec.runtime.job.settings import complaint_about

if TYPE_CHECKING:
    from moec.runtime.job.job import Job

T = TypeVar("T")
MAX_NAMED = 5
OTHER_CALLS = "ranks give job.load other paths or extras, or an optimizer on some ranks only"


@dataclass(slots=True)
class Loading:
    """What one rank reads of a checkpoint. `targets`: where tensors go, by name; `boxes`: the part of each.

    `small`: random states; `states`, `plain`: of the optimizer; `values`: the extras by name.
    """

    checkpoint: Checkpoint
    boxes: dict[str, Box] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    small: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Target] = field(default_factory=dict)
    plain: Plain | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def want(self, name: str, tensor: Tensor) -> None:
        """Will read this rank's part of `name`, which lies as `tensor` does."""
        self.boxes[name] = part_of(tensor).box

    def blocks(self) -> list[Block]:
        """Every block that it reads, shard by shard."""
        found = [block for name, box in self.boxes.items() for block in self.checkpoint.blocks(name, box)]
        return sorted(found, key=lambda block: block.rank)

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Copies into `targets`, each a part that `boxes` says."""
        dtypes = {name: DTYPES[self.checkpoint.index.tensors[name].dtype] for name in targets}

        def copy(block: Block, content: memoryview) -> None:
            flat, target = torch.frombuffer(content, dtype=dtypes[block.name]), targets[block.name]
            for part in block.copies:
                size = torch.Size(part.shape).numel()
                target[part.target].copy_(flat[part.first : part.first + size].view(part.shape)[part.source])

        blocks = [block for name in targets for block in self.checkpoint.blocks(name, self.boxes[name])]
        self.checkpoint.read(sorted(blocks, key=lambda block: block.rank), copy, check=False)

    def read_small(self, name: str, box: Box | None = None) -> Tensor:
        """A small tensor, or a part of it, read and checked once."""
        entry = self.checkpoint.index.tensors[name]
        box = tuple((0, dim) for dim in entry.shape) if box is None else box
        tensor = torch.empty([stop - start for start, stop in box], dtype=DTYPES[entry.dtype])
        self.boxes[name] = box
        self.checkpoint.read(self.checkpoint.blocks(name, box), check=True)
        self.read({name: tensor})
        del self.boxes[name]
        return tensor


def load(
    job: Job, path: str | Path, model: PlanModule, optimizer: Optimizer | None, extras: Mapping[str, Any]
) -> dict[str, Any]:
    """Loads a checkpoint. `Job.load` describes it."""
    saves = job.saves
    complaint = saves.wait()
    given = (zlib.crc32(str(path).encode()), int(optimizer is not None), zlib.crc32("\0".join(sorted(extras)).encode()))
    job.checks.require("job.load", complaint, MustMatch("MOE0811", OTHER_CALLS, given))
    number = saves.next_number()

    def together(work: Callable[[], T], stage: str) -> T:
        """`work()` on every rank, or its first error on every rank. Ranks may take any time."""
        result, complaint = None, None
        try:
            result = work()
        except JobError as error:
            complaint = Complaint.of(error)
        except (RuntimeError, MemoryError) as error:  # out of memory on this rank: the others wait for it
            complaint = Complaint("MOE0811", f"it failed here: {type(error).__name__}: {str(error)[:300]}")
        saves.peers.meet(f"{number}/{stage}")
        job.checks.require("job.load", complaint)
        return result  # type: ignore[return-value]

    loading = together(lambda: _prepared(job, Path(path), model, optimizer, extras), "prepared")
    together(lambda: loading.checkpoint.read(loading.blocks(), check=True), "checked")
    together(lambda: _fill(job, loading, model, optimizer), "filled")
    together(lambda: _give(loading, extras), "given")
    index = loading.checkpoint.index
    _restore_random_states(loading, next(model.parameters()).device)
    saves.note(Path(path).parent, loading.checkpoint.head.step, time.monotonic())
    return {name: value for name, value in loading.values.items() if not index.extras[name].loads}


def _prepared(
    job: Job, path: Path, model: PlanModule, optimizer: Optimizer | None, extras: Mapping[str, Any]
) -> Loading:
    """Reads the index and compares it with what is here. Changes nothing."""
    loading = Loading(Checkpoint(path))
    index, head, plan = loading.checkpoint.index, loading.checkpoint.head, job.plan
    tensors = tensors_of(model, plan)
    _require_same_model(path, index.tensors, tensors, head.model, plan.name)
    for name, tensor in tensors.items():
        loading.want(MODEL + name, tensor)
        loading.targets[MODEL + name] = part_of(tensor).local
    unfit = complaint_about(index.settings)
    if unfit is not None:
        raise JobError(*unfit)
    if optimizer is not None:
        named = parameters_by_name(model, plan)
        loading.states = targets_of(require_optimizer(optimizer), index.optimizer, index.tensors, named)
        for name, target in loading.states.items():
            try:
                loading.want(name, target.place)
            except UnevenError as error:
                raise JobError("MOE0806", f"{name} cannot be loaded: {error}") from error
        assert index.optimizer is not None
        try:
            loading.plain = plain_of(index.optimizer, lambda group, i: _small(loading, f"{OPTIONS}{group}/", i))
        except (ValueError, TypeError) as error:
            raise JobError("MOE0801", f"{path}: optimizer: {error}") from error
    if head.world_size == plan.world_size:
        _read_random_states(loading, job, next(model.parameters()).device)
    _read_extras(loading, extras, plan.data_rank(job.rank), plan.data_size)
    return loading


def _read_random_states(loading: Loading, job: Job, device: torch.device) -> None:
    """Reads this rank's rows. Raises `JobError` MOE0801 for what is no random state."""
    for kind, state in random_states(device).items():
        entry = loading.checkpoint.index.tensors.get(RNG + kind)
        if entry is None or entry.dtype != "U8" or entry.shape != (job.world_size, state.numel()):
            continue
        found = loading.read_small(RNG + kind, ((job.rank, job.rank + 1), (0, state.numel()))).view(-1)
        try:
            torch.Generator("cpu" if kind == "cpu" else device).set_state(found)
        except RuntimeError as error:
            raise JobError("MOE0801", f"{loading.checkpoint.path}: {RNG}{kind}: {error}") from error
        loading.small[RNG + kind] = found


def tensors_of(model: PlanModule, plan: Plan) -> dict[str, Tensor]:
    """Parameters and states by their names in the plan."""
    return {**parameters_by_name(model, plan), **states_by_name(model, plan)}


def _require_same_model(
    path: Path, stored: Mapping[str, Entry], here: Mapping[str, Tensor], model: str, name: str
) -> None:
    """Raises `JobError` MOE0805 unless the checkpoint has the model's tensors, with their shapes and dtypes."""
    there = {key.removeprefix(MODEL): entry for key, entry in stored.items() if key.startswith(MODEL)}
    unlike = []
    for key in [*there, *(key for key in here if key not in there)]:
        said = _described(there.get(key)), _described(here.get(key))
        if said[0] != said[1]:
            unlike.append(f"{key} is {said[0]} in the checkpoint, {said[1]} here")
    if not unlike:
        return
    more = f"; and {len(unlike) - MAX_NAMED} more" if len(unlike) > MAX_NAMED else ""
    raise JobError(
        "MOE0805",
        f"{path} is of {model}, and this model is {name}: {'; '.join(unlike[:MAX_NAMED])}{more}",
        "load a checkpoint of the same model; its plan, its degrees and the world size may differ",
    )


def _described(tensor: Entry | Tensor | None) -> str:
    if tensor is None:
        return "missing"
    dtype = DTYPES[tensor.dtype] if isinstance(tensor, Entry) else tensor.dtype
    return f"{str(dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _small(loading: Loading, prefix: str, number: int) -> Tensor:
    """A tensor of plain data, whole."""
    name = f"{prefix}{number}"
    if name not in loading.checkpoint.index.tensors:
        raise JobError("MOE0801", f"{loading.checkpoint.path}: {name} is missing")
    return loading.read_small(name)


def _read_extras(loading: Loading, asked: Mapping[str, Any], data_rank: int, data_size: int) -> None:
    """Reads extras that are asked for, and plain values. Raises `JobError` MOE0809 for one that does not fit."""
    checkpoint = loading.checkpoint
    stored = checkpoint.index.extras
    for name, receiver in asked.items():
        if name not in stored:
            known = ", ".join(stored) or "none"
            raise _unfit(f"{checkpoint.path} has no extra {name}; it has {known}", "leave it out, or load another one")
        if not _receives(receiver, loads=stored[name].loads):
            what = "an object's state" if stored[name].loads else "plain data"
            raise _unfit(
                f"{name} is {what} in the checkpoint, and a {type(receiver).__name__} here, which cannot take it",
                "give an object with `load_state_dict` for a state, a dict for a dict; other plain values are in the "
                "result of `job.load`",
            )
    for name, extra in stored.items():
        copies = len(extra.copies)
        if copies not in (1, data_size) and name in asked:
            raise _unfit(
                f"{name} differs between data ranks: the checkpoint has it for data_size {copies}, and here data_size "
                f"is {data_size}",
                "load it with as many data ranks, or leave it out and start it anew",
            )
        if (name not in asked and extra.loads) or copies not in (1, data_size):
            continue
        copy = data_rank if copies > 1 else 0
        try:
            loading.values[name] = decode(extra.copies[copy], partial(_small, loading, f"{EXTRAS}{name}/{copy}/"))
        except (ValueError, TypeError) as error:
            raise JobError("MOE0801", f"{checkpoint.path}: extra {name}: {error}") from error
        if name in asked and not extra.loads and not isinstance(loading.values[name], Mapping):
            raise _unfit(f"{name} is no dict in the checkpoint, but one here", "read it from what `job.load` returns")


def _receives(receiver: object, *, loads: bool) -> bool:
    return callable(getattr(receiver, "load_state_dict", None)) if loads else isinstance(receiver, MutableMapping)


def _unfit(message: str, help: str) -> JobError:
    return JobError("MOE0809", message, help)


def _fill(job: Job, loading: Loading, model: PlanModule, optimizer: Optimizer | None) -> None:
    """Copies everything into place; parameters keep their identity."""
    index, targets, states = loading.checkpoint.index, dict(loading.targets), dict[str, dict[str, Tensor]]()
    for full, target in loading.states.items():
        tensor = target.make()
        targets[full] = part_of(tensor).local
        states.setdefault(full.split("/", 2)[2], {})[target.key] = tensor
    try:
        loading.read(targets)
    except JobError as error:  # a file has changed since it was checked
        first = error.diagnostics[0]
        raise JobError(first.code, f"{first.message}; a part of the model is loaded already", first.help) from error
    if optimizer is not None:
        assert loading.plain is not None
        named = parameters_by_name(model, job.plan)
        put_back(optimizer, loading.plain, named, states)
    model.settings.update(index.settings)
    model.drop_loads()
    job.steps = index.job_steps


def _restore_random_states(loading: Loading, device: torch.device) -> None:
    """Comes last: an extra's `load_state_dict` may draw."""
    if RNG + "cpu" in loading.small:
        torch.set_rng_state(loading.small[RNG + "cpu"])
    if RNG + "cuda" in loading.small:
        torch.cuda.set_rng_state(loading.small[RNG + "cuda"], device)


def _give(loading: Loading, extras: Mapping[str, Any]) -> None:
    """Gives the extras their values."""
    for name, receiver in extras.items():
        value = loading.values[name]
        if not loading.checkpoint.index.extras[name].loads:
            receiver.clear()
            receiver.update(value)
            continue
        try:
            receiver.load_state_dict(value)
        except Exception as error:
            raise _unfit(
                f"{name}.load_state_dict raised {type(error).__name__}: {str(error)[:300]}; model and optimizer are "
                "loaded already",
                "give the object that the checkpoint's state is of",
            ) from error
