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


class Unmovable(Exception):  # noqa: N818 - a reason, not an error
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
    """Of the parts, with what ranks have alike of each."""
    single: list[str] = field(default_factory=list)
    """What optimizers keep of all experts together, in words."""
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor that moves. One that is there moves once: an optimizer may share its states with another one, and a
        copy its parameters with the model. Raises `Unmovable`."""
        part = local_part(tensor)
        if type(part) not in (Tensor, nn.Parameter) or part.is_inference():
            kind = "was made in inference mode" if part.is_inference() else f"is a tensor of type {type(part).__name__}"
            raise Unmovable(f"`{name}` of experts of {self.site} {kind}")
        key = part.data_ptr(), part.dtype, part.shape, part.stride()
        if key not in self._seen:
            self._seen.add(key)
            self.parts.append(part)
            self.names.append(f"{name} {part.dtype} {[*part.shape]}")

    def add_state(self, name: str, value: Any, parameter: nn.Parameter) -> None:
        """What an optimizer keeps of a parameter: it moves if it has a row for each expert. Raises `Unmovable`."""
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
        raise Unmovable(f"an optimizer keeps `{name}`, a {what}, of experts of {self.site}")

    def require_apart(self) -> None:
        """Raises `Unmovable` for parts on several devices, and for parts that share memory."""
        if len(devices := {str(part.device) for part in self.parts}) > 1:
            raise Unmovable(f"copies or optimizers of {self.site} are on several devices: {', '.join(sorted(devices))}")
        by_storage: dict[int, list[Tensor]] = {}
        for part in self.parts:
            by_storage.setdefault(part.untyped_storage().data_ptr(), []).append(part)
        if any(map(_overlap, by_storage.values())):
            raise Unmovable(f"two tensors of experts of {self.site}, or two parts of one, share memory")

    @property
    def expert_bytes(self) -> int:
        """Those of one expert."""
        return sum(part[0].nbytes for part in self.parts)

    def sums(self) -> tuple[int, int]:
        """Checksums of names and of what is of all experts together: alike on ranks that have the same."""
        return _crc(self.names), _crc(sorted(self.single))


def _crc(lines: Iterable[str]) -> int:
    return zlib.crc32("\n".join(lines).encode())


def _overlap(parts: list[Tensor]) -> bool:
    """Whether two elements of parts of one storage are the same."""
    spans = sorted((part.data_ptr(), part.data_ptr() + _span(part) * part.element_size()) for part in parts)
    are_dense = all(_span(part) == part.numel() and _moves_in_every_dim(part) for part in parts)
    if are_dense and all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return False
    if len({part.dtype for part in parts}) > 1 or not all(map(_moves_in_every_dim, parts)):
        return True
    first = parts[0]
    size = first.untyped_storage().nbytes() // first.element_size()
    taken = torch.zeros(size, dtype=torch.bool, device=first.device)
    for part in parts:
        taken.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(True)
    return int(taken.sum()) < sum(part.numel() for part in parts)


def _span(part: Tensor) -> int:
    """Elements of memory from the first one to the last."""
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return last + 1 if part.numel() else 0


def _moves_in_every_dim(part: Tensor) -> bool:
    """Whether no dim is expanded."""
    return all(stride or size < 2 for size, stride in zip(part.shape, part.stride(), strict=True))
