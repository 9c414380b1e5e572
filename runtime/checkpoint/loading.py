"""Loads a checkpoint into a model, its optimizer and extras: every rank reads its part.

First every rank checks everything that it will read, and the ranks agree. Then they copy, without checking again: a
file that changes in between may go unnoticed, or raise after a part is loaded.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from moec.codegen.emit import DTYPES as COMPUTED
from moec.codegen.plan import Plan, PlanParameter
from moec.runtime.checkpoint.content import random_states, require_optimizer
from moec.runtime.checkpoint.description import degrees_of
from moec.runtime.checkpoint.extras import give, read_extras
from moec.runtime.checkpoint.format.faults import unexpected
from moec.runtime.checkpoint.format.files import shown
from moec.runtime.checkpoint.format.grid import Box
from moec.runtime.checkpoint.format.index import MODEL, RNG, Entry
from moec.runtime.checkpoint.format.parts import DTYPES, UnevenError, copy_block, part_of
from moec.runtime.checkpoint.format.reading import Block, Checkpoint
from moec.runtime.checkpoint.model_fields import other_biases
from moec.runtime.checkpoint.optimizer_state import (
    OPTIONS,
    PlainState,
    Target,
    plain_state_of,
    put_back,
    require_members,
    targets_of,
)
from moec.runtime.checkpoint.remarks import changed_options, first_of, remarks
from moec.runtime.checkpoint.saving import checksum
from moec.runtime.checkpoint.stages_of_checkpoint import tensors_without, without
from moec.runtime.errors import JobError
from moec.runtime.inputs.settings import complaint_about
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import parameters_by_name, states_by_name
from moec.runtime.model.run import Run
from moec.runtime.ranks.checks import Complaint, MustMatch
from moec.runtime.ranks.groups import HOST
from moec.runtime.ranks.watch import collective
from moec.runtime.script import warn

if TYPE_CHECKING:
    from moec.runtime.checkpoint.job_checkpoints import JobCheckpoints

T = TypeVar("T")

ADDED_TOKENS = (
    "for added tokens export the checkpoint (`moec weights export`), make their rows in transformers, and import that "
    "(docs/huggingface.md#added-tokens)"
)


@dataclass(slots=True)
class Loading:
    """What one rank reads of a checkpoint. By tensors' names: `boxes` to read, and `targets` to copy them to.

    `states`, `plain` and `changed_options` are the optimizer's; `values` are the extras by name. `ranks_draw_alike`:
    all ranks had the same random state before the load.
    """

    checkpoint: Checkpoint
    boxes: dict[str, Box] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    random_states: dict[str, Tensor] = field(default_factory=dict)
    keeps_random_states: bool = False
    ranks_draw_alike: bool = False
    states: dict[str, Target] = field(default_factory=dict)
    plain: PlainState | None = None
    changed_options: Sequence[str] = ()
    values: dict[str, Any] = field(default_factory=dict)

    def want(self, name: str, tensor: Tensor) -> None:
        """Plans to read this rank's part of `name`, whose layout is that of `tensor`."""
        self.boxes[name] = part_of(tensor).box

    def blocks(self) -> list[Block]:
        """Every block that this rank reads, shard by shard."""
        blocks = [block for name, box in self.boxes.items() for block in self.checkpoint.blocks(name, box)]
        return sorted(blocks, key=lambda block: block.rank)

    def read(self, targets: Mapping[str, Tensor], *, check: bool) -> None:
        """Copies the part `boxes[name]` of every tensor in `targets`. `check` compares digests."""
        dtypes = {name: DTYPES[self.checkpoint.index.tensors[name].dtype] for name in targets}

        def copy(block: Block, content: memoryview) -> None:
            copy_block(block, content, dtypes[block.name], targets[block.name])

        blocks = [block for name in targets for block in self.checkpoint.blocks(name, self.boxes[name])]
        self.checkpoint.read(sorted(blocks, key=lambda block: block.rank), copy, check=check)

    def read_small(self, name: str, box: Box | None = None) -> Tensor:
        """A small tensor, or a part of it, read and checked once."""
        entry = self.checkpoint.index.tensors[name]
        box = tuple((0, dim) for dim in entry.shape) if box is None else box
        tensor = torch.empty([stop - start for start, stop in box], dtype=DTYPES[entry.dtype])
        self.boxes[name] = box
        self.read({name: tensor}, check=True)
        del self.boxes[name]
        return tensor

    def read_plain(self, prefix: str, number: int) -> Tensor:
        """Tensor `number` of plain data, whole. Raises `JobError` MOE0801 if it is missing."""
        name = f"{prefix}{number}"
        if name not in self.checkpoint.index.tensors:
            raise JobError("MOE0801", f"{self.checkpoint.path}: {name} is missing")
        return self.read_small(name)


def load(
    job: JobCheckpoints,
    path: str | Path,
    model: PlanModule,
    optimizer: Optimizer | None,
    extras: Mapping[str, Any],
    *,
    resumes: bool = False,
) -> dict[str, Any]:
    """Loads a checkpoint. `Job.load` describes it. `resumes`: for `Job.resume`, which returns no values."""
    saves = job.saves
    complaint = saves.wait() or model.open_step_complaint()
    job.checks.require("job.load", complaint, *_same_calls(str(path), optimizer, extras))
    number = saves.next_number()
    job.bring_home("job.load", model)
    if model.homes is not None and optimizer is not None:
        model.homes.add(optimizer)

    def together(act: Callable[[], T], stage: str) -> T:
        """The result of `act()` on every rank, or its first error on every rank. Ranks may take any time."""
        result, complaint, cause = None, None, None
        try:
            result = act()
        except JobError as error:
            complaint, cause = Complaint.of(error), error.__cause__
        except Exception as error:  # noqa: BLE001 - the other ranks wait, whatever an object of the script raises
            complaint, cause = Complaint.of(unexpected(error)), error
        saves.peers.barrier(f"{number}/{stage}")
        try:
            job.checks.require("job.load", complaint)
        except JobError as error:
            raise error from cause or error.__cause__
        return result  # type: ignore[return-value]

    ranks_draw_alike = _ranks_draw_alike(job, next(model.parameters()).device)
    loading = together(lambda: _prepared(job, Path(path), model, optimizer, extras, ranks_draw_alike), "prepared")
    together(lambda: loading.checkpoint.read(loading.blocks(), check=True), "checked")
    together(lambda: _fill(job, loading, model, optimizer), "filled")
    together(lambda: give(loading, extras), "given")
    index = loading.checkpoint.index
    _restore_random_states(loading, next(model.parameters()).device)
    saves.note(Path(path).parent, loading.checkpoint.head.step, time.monotonic())
    saves.enter_again()
    model.run = Run.of(loading.checkpoint.head)
    if job.rank == 0:
        for words in remarks(loading, job.plan, optimizer, extras, resumes=resumes):
            warn(f"{shown(Path(path).absolute())}: {words}")
    return {name: value for name, value in loading.values.items() if not index.extras[name].loads}


def _same_calls(path: str, optimizer: Optimizer | None, extras: Mapping[str, Any]) -> tuple[MustMatch, ...]:
    """The claims that must match on all ranks: the path, whether there is an optimizer, the names of extras."""
    claims = {
        "ranks called job.load with different paths": checksum(path),
        "some ranks called job.load with an optimizer, others without one": int(optimizer is not None),
        "ranks called job.load with extras of different names": checksum(*sorted(extras)),
    }
    return tuple(MustMatch("MOE0811", words, (number,)) for words, number in claims.items())


def _ranks_draw_alike(job: JobCheckpoints, device: torch.device) -> bool:
    """Whether all ranks have the same random states now, as if a script seeds them alike. A collective."""
    digest = zlib.crc32(b"".join(state.cpu().numpy().tobytes() for state in random_states(device).values()))
    bounds = torch.tensor([digest, -digest])
    if job.world_size > 1:
        with collective("all_reduce", job.number + HOST, "job.load") as peers:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=peers)
    return int(bounds.sum()) == 0  # the largest digest minus the smallest


def _prepared(
    job: JobCheckpoints,
    path: Path,
    model: PlanModule,
    optimizer: Optimizer | None,
    extras: Mapping[str, Any],
    ranks_draw_alike: bool,
) -> Loading:
    """Reads the index and compares it with the model, the optimizer and the extras. Changes nothing."""
    loading = Loading(Checkpoint(path), ranks_draw_alike=ranks_draw_alike)
    index, head, plan = loading.checkpoint.index, loading.checkpoint.head, job.plan
    tensors, elsewhere = tensors_of(model, plan), plan.elsewhere(job.rank)
    stored = {name: entry for name, entry in index.model_tensors.items() if name not in elsewhere}
    _require_same_model(path, stored, tensors, head.model, plan)
    if words := other_biases(index.model, plan.spec):
        message = f"{path} is a checkpoint of {head.model}, and this model is {plan.name}: {words}"
        raise JobError("MOE0805", message, "give the gate the checkpoint's `bias`")
    for name, tensor in tensors.items():
        loading.want(MODEL + name, tensor)
        loading.targets[MODEL + name] = part_of(tensor).local
    unfit = complaint_about(index.settings)
    if unfit is not None:
        raise unfit.error()
    if optimizer is not None:
        named = parameters_by_name(model, plan)
        require_members(require_optimizer(optimizer), named)
        entry = without(index.optimizer, elsewhere)
        loading.states = targets_of(optimizer, entry, tensors_without(index.tensors, elsewhere), named)
        for name, target in loading.states.items():
            try:
                loading.want(name, target.like)
            except UnevenError as error:
                raise JobError("MOE0806", f"{name} cannot be loaded: {error}") from error
        assert entry is not None
        try:
            loading.plain = plain_state_of(
                optimizer, entry, named, lambda group, i: loading.read_plain(f"{OPTIONS}{group}/", i)
            )
        except (ValueError, TypeError) as error:
            raise JobError("MOE0801", f"{path}: optimizer: {error}") from error
        loading.changed_options = changed_options(optimizer, loading.plain)
    _read_random_states(loading, job, next(model.parameters()).device)
    read_extras(loading, extras, plan.data_rank(job.rank), plan.data_size)
    return loading


def _read_random_states(loading: Loading, job: JobCheckpoints, device: torch.device) -> None:
    """Reads the random states that this rank takes. Raises `JobError` MOE0801 for data that is no random state."""
    head = loading.checkpoint.head
    for kind, state in random_states(device).items():
        entry = loading.checkpoint.index.tensors.get(RNG + kind)
        if entry is None or entry.dtype != "U8" or entry.shape != (head.world_size, state.numel()):
            continue
        row = _row_of_random_states(loading, entry, job)
        if row is None:
            loading.keeps_random_states = True
            continue
        random_state = loading.read_small(RNG + kind, ((row, row + 1), (0, state.numel()))).view(-1)
        try:
            torch.Generator("cpu" if kind == "cpu" else device).set_state(random_state)
        except RuntimeError as error:
            raise JobError("MOE0801", f"{loading.checkpoint.path}: {RNG}{kind}: {error}") from error
        loading.random_states[RNG + kind] = random_state


def _row_of_random_states(loading: Loading, entry: Entry, job: JobCheckpoints) -> int | None:
    """The rank in the checkpoint whose random state this rank takes: one with its data rank. None if there is none.

    A random state that all ranks had fits any number of ranks. A single data rank does not show how a script seeds its
    ranks: several ranks take its state only if they have the same state now.
    """
    checkpoint, plan = loading.checkpoint, job.plan
    ranks = checkpoint.index.data_ranks
    here = tuple(plan.data_rank(rank) for rank in range(plan.world_size))
    if ranks == here or (not ranks and checkpoint.head.degrees == degrees_of(plan)):
        return job.rank
    if len(set(entry.digests)) == 1 and (checkpoint.head.data_size > 1 or loading.ranks_draw_alike):
        return 0
    if not ranks or checkpoint.head.data_size != plan.data_size:
        return None
    return ranks.index(plan.data_rank(job.rank))


def tensors_of(model: PlanModule, plan: Plan) -> dict[str, Tensor]:
    """Parameters and states by their names in the plan."""
    return {**parameters_by_name(model, plan), **states_by_name(model, plan)}


def _require_same_model(
    path: Path, there: Mapping[str, Entry], here: Mapping[str, Tensor], model: str, plan: Plan
) -> None:
    """Raises `JobError` MOE0805 unless the checkpoint has the model's tensors, with their shapes and dtypes.

    A parameter may be frozen in its compute dtype on one side and an fp32 master on the other: layers compute alike,
    and widening is exact.
    """
    unlike: dict[str, str] = {}
    for key in [*there, *(key for key in here if key not in there)]:
        entry, tensor = there.get(key), here.get(key)
        saved, now = _described(entry), _described(tensor)
        if saved != now and not _is_frozen_on_one_side(entry, tensor, plan.parameters.get(key)):
            unlike[key] = f"{key} is {saved} in the checkpoint, {now} here"
    if not unlike:
        return
    raise JobError(
        "MOE0805",
        f"{path} is of {model}, and this model is {plan.name}: {first_of([*unlike.values()])}",
        ADDED_TOKENS
        if unlike.keys() <= {"embedding.weight", "head.weight", "head.bias"}
        else "load a checkpoint of the same model; its plan, its degrees and the world size may differ",
    )


def _is_frozen_on_one_side(stored: Entry | None, here: Tensor | None, data: PlanParameter | None) -> bool:
    if stored is None or here is None or data is None or tuple(stored.shape) != tuple(here.shape):
        return False
    there = DTYPES[stored.dtype]
    return here.dtype == torch.float32 or (there, here.dtype) == (torch.float32, COMPUTED[data.dtype])


def _described(tensor: Entry | Tensor | None) -> str:
    if tensor is None:
        return "missing"
    dtype = DTYPES[tensor.dtype] if isinstance(tensor, Entry) else tensor.dtype
    return f"{str(dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _fill(job: JobCheckpoints, loading: Loading, model: PlanModule, optimizer: Optimizer | None) -> None:
    """Copies everything into place; parameters keep their identity."""
    index, targets, states = loading.checkpoint.index, dict(loading.targets), dict[str, dict[str, Tensor]]()
    for stored_name, target in loading.states.items():
        tensor = target.make()
        targets[stored_name] = part_of(tensor).local
        states.setdefault(stored_name.split("/", 2)[2], {})[target.key] = tensor
    try:
        loading.read(targets, check=False)
    except JobError as error:  # a file has changed since it was checked
        first = error.diagnostics[0]
        raise JobError(first.code, f"{first.message}; a part of the model is loaded already", first.help) from error
    if optimizer is not None:
        assert loading.plain is not None
        named = parameters_by_name(model, job.plan)
        put_back(optimizer, loading.plain, named, states)
    model.zero_grad()  # gradients of the former weights would be added to those of the next step
    model.settings.update(index.settings)
    model.drop_loads()
    job.steps, job.total_tokens = index.job_steps, index.job_tokens


def _restore_random_states(loading: Loading, device: torch.device) -> None:
    """Restores torch's random states, after all else: an extra's `load_state_dict` may draw random numbers."""
    if RNG + "cpu" in loading.random_states:
        torch.set_rng_state(loading.random_states[RNG + "cpu"])
    if RNG + "cuda" in loading.random_states:
        torch.cuda.set_rng_state(loading.random_states[RNG + "cuda"], device)
