"""Collects what a rank stores in a checkpoint: its part of every tensor, and plain data. Copies only the extras."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moec.codegen.plan import Plan
from moec.runtime.checkpoint.format.index import MODEL, RNG, canonical
from moec.runtime.checkpoint.format.parts import Part, UnevenError, host_copies, part_of
from moec.runtime.checkpoint.format.shards import HostTensor
from moec.runtime.checkpoint.format.trees import encode
from moec.runtime.checkpoint.optimizer_state import OptimizerContent, collect
from moec.runtime.checkpoint.stages_of_checkpoint import writes
from moec.runtime.errors import JobError
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import parameters_by_name, states_by_name

NAME_LENGTH = 100


@dataclass(frozen=True, slots=True)
class ExtraContent:
    """An extra of this rank. `loads`: it came from a `state_dict`. `tree`: plain data with the numbers of its tensors.

    `tensors` are copies in host memory, named by their numbers: the script may change its own tensors meanwhile.
    """

    loads: bool
    tree: Any
    tensors: tuple[HostTensor, ...]

    def digest(self) -> str:
        """Equal extras have equal digests, whatever the rank."""
        whole = hashlib.sha256(canonical([self.loads, self.tree]))
        for tensor in self.tensors:
            whole.update(canonical([tensor.dtype, tensor.shape]))
            whole.update(tensor.content)
        return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class Content:
    """All that a rank stores. `parts`: by the tensors' names in a checkpoint; `optimizer`: an `OptimizerEntry`'s data.

    `settings` are the model's; `job_steps` and `job_tokens` are the job's counts of steps and of all ranks' tokens.
    """

    parts: Mapping[str, Part]
    optimizer: dict[str, Any] | None
    extras: Mapping[str, ExtraContent]
    settings: Mapping[str, int]
    job_steps: int
    job_tokens: int

    def copies(self) -> tuple[list[HostTensor], dict[str, Part]]:
        """Copies in host memory of the chunks that this rank writes, and their parts."""
        largest_first = sorted(self.parts, key=lambda name: (-self.parts[name].num_bytes, name))
        written = {
            name: self.parts[name] for number, name in enumerate(largest_first) if self.parts[name].writes_chunk(number)
        }
        return host_copies({name: part.local for name, part in written.items()}), written

    def digests_of_extras(self) -> dict[str, str]:
        """The digest of every extra."""
        return {name: extra.digest() for name, extra in self.extras.items()}


def content_of(
    plan: Plan,
    model: PlanModule,
    optimizer: Optimizer | None,
    extras: Mapping[str, Any],
    rank: int,
    job_steps: int,
    job_tokens: int,
) -> Content:
    """Everything that a checkpoint stores, with copies of the extras. Raises `JobError` for what it cannot."""
    named = parameters_by_name(model, plan)
    elsewhere, size = plan.elsewhere(rank), plan.stage_size
    if lacking := [name for name in plan.parameters if name not in named and name not in elsewhere]:
        raise JobError(
            "MOE0710",
            f"the model no longer has {lacking[0]}{f' and {len(lacking) - 1} more' * (len(lacking) > 1)}",
            "save the whole model: no plan could load a part of it",
        )
    tensors: dict[str, Tensor] = {MODEL + name: tensor for name, tensor in named.items()}
    tensors |= {MODEL + name: tensor for name, tensor in states_by_name(model, plan).items()}
    state = None if optimizer is None else collect(require_optimizer(optimizer), named)
    tensors |= (state or OptimizerContent({})).tensors
    written = {name: tensor for name, tensor in tensors.items() if writes(name, plan, rank)}
    parts = _parts(written, rank % size, size)
    device = next(model.parameters()).device
    for kind, words in random_states(device).items():
        row = words.reshape(1, -1)
        cuts = plan.world_size, 1
        parts[RNG + kind] = Part((plan.world_size, row.shape[1]), cuts, (rank, 0), 0, 1, row)
    stored = {name: _extra(name, value) for name, value in extras.items()}
    entry = None if state is None else state.entry
    return Content(parts, entry, stored, dict(model.settings), job_steps, job_tokens)


def require_optimizer(optimizer: object) -> Optimizer:
    """Raises `JobError` for anything but an optimizer of torch."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise JobError(
        "MOE0807",
        f"the optimizer is of class {type(optimizer).__name__}, not a torch.optim.Optimizer",
        "give the optimizer itself; other objects with `state_dict` are extras: `scheduler=scheduler`",
    )


def random_states(device: torch.device) -> dict[str, Tensor]:
    """torch's random states on this rank, uint8: that of the CPU, and that of the model's GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _parts(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Part]:
    parts = {}
    for name, tensor in tensors.items():
        try:
            parts[name] = part_of(tensor, rank, world_size)
        except UnevenError as error:
            raise JobError("MOE0807", f"{name} cannot be stored yet: {error}") from error
    return parts


def _extra(name: str, value: Any) -> ExtraContent:
    if len(name) > NAME_LENGTH:
        raise JobError("MOE0808", f"the name of an extra has {len(name)} characters; the limit is {NAME_LENGTH}")
    tensors: list[Tensor] = []
    state_dict: Callable[[], Any] | None = getattr(value, "state_dict", None)
    loads = callable(state_dict) and callable(getattr(value, "load_state_dict", None))
    if isinstance(value, nn.Module):
        value = dict(value.state_dict())  # an OrderedDict with metadata
        loads = True
    elif loads:
        assert state_dict is not None
        value = state_dict()
    tree = encode(value, name, tensors)
    return ExtraContent(
        loads, tree, tuple(host_copies({str(number): extra_tensor for number, extra_tensor in enumerate(tensors)}))
    )
