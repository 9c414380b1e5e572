"""What of experts moves with them to another rank: tensors of a row for each expert, and what cannot move."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from moec.runtime.errors import JobError
from moec.runtime.weights.masters import local_part


class CannotMove(Exception):  # noqa: N818 - a reason, not an error
    """Why this rank cannot move its experts."""


def unmovable(words: str) -> JobError:
    """The error for experts that cannot change ranks, for the reason `words`."""
    help = (
        "copy models and make optimizers on every rank alike, with states of as many dims as the parameter and one row "
        "for each expert; load or copy an optimizer's state and replace parameters after `job.restore_homes`; or leave "
        "`greedy` out of `placement`"
    )
    return JobError("MOE0754", words, help)


@dataclass(slots=True)
class Movable:
    """This rank's parts of what moves, of a layer of `experts` on this rank; `site` is for messages."""

    site: str
    experts: int
    parts: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Name, dtype and shape of each part, which all ranks of the group have alike."""
    single: list[str] = field(default_factory=list)
    """What optimizers keep of all experts together, in words."""
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor that moves. One that has been added is left out: an optimizer may share its states with another one,
        and a copy its parameters with the model. Raises `CannotMove`."""
        part = local_part(tensor)
        if type(part) is not Tensor or part.is_inference():
            kind = "was made in inference mode" if part.is_inference() else f"is a tensor of type {type(part).__name__}"
            raise CannotMove(f"`{name}` of experts of {self.site} {kind}")
        strides = tuple(stride for size, stride in zip(part.shape, part.stride(), strict=True) if size > 1)
        key = part.data_ptr(), part.dtype, part.shape, strides
        if key not in self._seen:
            self._seen.add(key)
            self.parts.append(part)
            self.names.append(f"{name} {part.dtype} {[*part.shape]}")

    def add_state(self, name: str, value: Any, parameter: nn.Parameter) -> None:
        """What an optimizer keeps of a parameter: it moves if it has a row for each expert. Raises `CannotMove`."""
        if value is None or isinstance(value, bool | int | float | str):
            self.single.append(f"{name} {value!r}")
            return
        if isinstance(value, Tensor):
            is_cut = not isinstance(value, DTensor) or any(
                isinstance(p, Shard) and p.dim == 0 for p in value.placements
            )
            part = local_part(value)
            if is_cut and part.dim() == parameter.dim() and part.shape[0] == self.experts:
                self.add(name, value)
                return
            if value.numel() == 1:
                self.single.append(f"{name} {part.item()!r}")
                return
        what = f"{type(value).__name__} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise CannotMove(f"an optimizer keeps `{name}`, a {what}, of experts of {self.site}")

    def require_apart(self) -> None:
        """Raises `CannotMove` for parts on several devices, and for parts that share memory."""
        if len(devices := {str(part.device) for part in self.parts}) > 1:
            raise CannotMove(
                f"copies or optimizers of {self.site} are on several devices: {', '.join(sorted(devices))}"
            )
        by_storage: dict[int, list[Tensor]] = {}
        for part in self.parts:
            by_storage.setdefault(part.untyped_storage().data_ptr(), []).append(part)
        if any(map(_overlap, by_storage.values())):
            raise CannotMove(f"two tensors of experts of {self.site}, or two parts of one, share memory")

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert in all parts."""
        return sum(part[0].nbytes for part in self.parts)

    def sums(self) -> tuple[int, int]:
        """Checksums of names and of what is of all experts together: alike on ranks that have the same."""
        return _crc(self.names), _crc(self.single)


def _crc(lines: Iterable[str]) -> int:
    return zlib.crc32("\n".join(lines).encode())


def _overlap(parts: list[Tensor]) -> bool:
    """Whether a byte of the storage of these parts belongs to two elements."""
    spans = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
    if all(map(_is_dense, parts)) and all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return False
    storage = parts[0].untyped_storage()
    taken = torch.zeros(storage.nbytes(), dtype=torch.bool, device=parts[0].device)
    for part in parts:
        size = part.element_size()
        strides = [stride * size for stride in part.stride()]
        taken.as_strided((*part.shape, size), (*strides, 1), part.storage_offset() * size).fill_(True)
    return int(taken.sum()) < sum(part.nbytes for part in parts)


def _is_dense(part: Tensor) -> bool:
    """Whether its elements lie behind each other, in some order of its dims."""
    return part.permute(sorted(range(part.dim()), key=part.stride, reverse=True)).is_contiguous()
