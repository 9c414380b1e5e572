"""Adafactor over sharded parameters (Shazeer & Stern 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.grammar.spec.optimizers import Adafactor as AdafactorSpec
from moec.runtime.optimizers.matrix_optimizer import MatrixOptimizer
from moec.runtime.ranks.watch import collective
from moec.runtime.weights.masters import Master, by_decay, chunks, local_part

EPS = torch.finfo(torch.float32).eps
"""The least root of a second moment, as in `torch.optim.Adafactor`."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over each of a parameter's whole matrices, equal on every rank; dims that are summed over have size 1.

    `rows` sums squared gradients over columns, `columns` over rows, `squares` over both; `weights` sums squared
    weights; `factor` sums the old row factor over rows.
    """

    squares: Tensor
    weights: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    factor: Tensor | None = None


class Adafactor(MatrixOptimizer):
    """`torch.optim.Adafactor` on every matrix separately: each expert's, and both halves of a gated `up`.

    Heads and their width together are rows or columns. If ranks share a matrix, its sums are reduced over them, so
    that the update is that of the whole matrix. State: `step`; for matrices `row_var` and `col_var`, for vectors
    `variance`.
    """

    kind = "adafactor"

    def __init__(self, masters: Sequence[Master], spec: AdafactorSpec, state_dtype: torch.dtype | None = None) -> None:
        assert state_dtype is None, "MOE0337"
        options = {"lr": spec.lr, "decay": spec.decay, "clip": spec.clip, "eps": spec.eps}
        super().__init__(masters, by_decay(masters, spec.weight_decay), options)

    def update(self) -> None:
        """Updates every parameter group, a chunk of its parameters at a time."""
        for group in self.param_groups:
            for masters in chunks(self.taking_part(group["params"])):
                self._update(masters, group)

    def _update(self, masters: Sequence[Master], group: dict[str, Any]) -> None:
        gradients = [master.take_gradient(self.grad_scale) for master in masters]
        directions, squares = [], []
        for master, gradient, sums in zip(masters, gradients, self._sums(masters, gradients), strict=True):
            direction = None
            if gradient is not None:
                direction = gradient * self._moment(master, gradient, sums, group).clamp_(min=EPS**2).rsqrt_()
            squares.append(_square_sum(master, direction))
            directions.append((direction, sums.weights))
        _reduce([(total, m.groups(m.rows + m.columns)) for m, total in zip(masters, squares, strict=True)])
        for master, (direction, weights), total in zip(masters, directions, squares, strict=True):
            if direction is None:
                continue
            elements, step = master.size(master.rows + master.columns), float(self.state[master.parameter]["step"])
            relative = min(group["lr"], 1 / math.sqrt(step))
            size = (weights / elements).sqrt_().clamp_(min=group["eps"]) * relative
            size /= ((total / elements).sqrt_() / group["clip"]).clamp_(min=1.0)
            master.local.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * size)

    def _sums(self, masters: Sequence[Master], gradients: Sequence[Tensor | None]) -> list[_Sums]:
        """The sums of every parameter, in one reduction per group. A missing gradient counts as zeros."""
        sums_of_masters, reduced = [], []
        for master, gradient in zip(masters, gradients, strict=True):
            matrix_dims = master.rows + master.columns
            sums = {"squares": _square_sum(master, gradient), "weights": _square_sum(master, master.local)}
            groups = {"squares": master.groups(matrix_dims), "weights": master.groups(matrix_dims)}
            if master.rows:
                square = torch.zeros_like(master.local) if gradient is None else gradient.square()
                state = self._state(master)
                sums["rows"] = square.sum(master.columns, keepdim=True)
                sums["columns"] = square.sum(master.rows, keepdim=True)
                sums["factor"] = local_part(state["row_var"]).sum(master.rows, keepdim=True)
                groups["rows"] = master.groups(master.columns)
                groups["columns"] = groups["factor"] = master.groups(master.rows)
            sums_of_masters.append(_Sums(**sums))
            reduced += [(total, groups[name]) for name, total in sums.items()]
        _reduce(reduced)
        return sums_of_masters

    def _state(self, master: Master) -> dict[str, Any]:
        state: dict[str, Any] = self.state[master.parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            if master.rows:
                state["row_var"], state["col_var"] = map(master.zeros_without, (master.columns, master.rows))
            else:
                state["variance"] = torch.zeros_like(master.parameter)
        return state

    def _moment(self, master: Master, gradient: Tensor, sums: _Sums, group: dict[str, Any]) -> Tensor:
        """The second moment after this step's gradient, as a new tensor."""
        state = self._state(master)
        state["step"] += 1
        weight = float(state["step"]) ** -group["decay"]
        if sums.rows is None or sums.columns is None or sums.factor is None:
            return local_part(state["variance"]).lerp_(gradient.square(), weight).clone()
        rows, columns = master.size(master.rows), master.size(master.columns)
        row, column = local_part(state["row_var"]), local_part(state["col_var"])
        row.lerp_(sums.rows / columns, weight)
        column.lerp_(sums.columns / rows, weight)
        # The mean of the new row factor over all rows, which this rank may not have.
        mean = (sums.factor / rows).lerp_(sums.squares / (rows * columns), weight)
        return row * column / mean.clamp_(min=EPS)


def _square_sum(master: Master, values: Tensor | None) -> Tensor:
    """The sum of squares of every matrix in this rank's part, with size 1 in its dims."""
    dims = master.rows + master.columns
    if values is None:
        return master.local.new_zeros([1 if dim in dims else size for dim, size in enumerate(master.local.shape)])
    norms: Tensor = torch.linalg.vector_norm(values, dim=dims, keepdim=True)
    return norms.square_()


def _reduce(sums: Sequence[tuple[Tensor, tuple[str, ...]]]) -> None:
    """Sums every tensor over its groups, in place: one all_reduce per group."""
    by_group: dict[str, list[Tensor]] = {}
    for tensor, groups in sums:
        for group in groups:
            by_group.setdefault(group, []).append(tensor)
    for group in sorted(by_group):
        flat = torch.cat([tensor.flatten() for tensor in by_group[group]])
        with collective("all_reduce", group, "Adafactor, sums over matrices") as peers:
            dist.all_reduce(flat, group=peers)
        totals = torch.split(flat, [tensor.numel() for tensor in by_group[group]])
        for tensor, total in zip(by_group[group], totals, strict=True):
            tensor.copy_(total.view(tensor.shape))
