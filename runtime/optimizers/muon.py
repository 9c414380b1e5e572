"""Muon over sharded hidden matrices, and AdamW for all other parameters (Jordan et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moec.grammar.spec.optimizers import Muon as MuonSpec
from moec.runtime.optimizers.elementwise_optimizers import MOMENTS, update_by_adamw, widened, widened_chunks
from moec.runtime.optimizers.matrix_optimizer import MatrixOptimizer
from moec.runtime.optimizers.newton_schulz import compute_dtype, orthogonalized
from moec.runtime.optimizers.whole_matrices import Cut, apply_to_whole
from moec.runtime.weights.masters import Master, by_decay, chunks, local_part


class Muon(MatrixOptimizer):
    """Updates hidden matrices by Muon, each expert's separately, and all other parameters by fused AdamW.

    The first parameter group has the hidden matrices. A sharded matrix is orthogonalised whole, by one of the ranks
    that share it. Matrices that are whole on their rank need no collective. State: `momentum_buffer`; for AdamW `step`,
    `exp_avg` and `exp_avg_sq`; all but `step` are kept in `state_dtype` between steps, by default the parameter's.
    The `momentum` of AdamW's groups is its beta1, so that a scheduler cycles both.
    """

    kind = "muon"

    def __init__(self, masters: Sequence[Master], spec: MuonSpec, state_dtype: torch.dtype | None = None) -> None:
        self.state_dtype = state_dtype
        hidden = [master for master in masters if master.matrices.hidden]
        not_hidden = [master for master in masters if not master.matrices.hidden]
        adamw = spec.adamw
        options = {"lr": adamw.lr, "momentum": adamw.beta1, "beta2": adamw.beta2, "eps": adamw.eps, "fused": True}
        groups: list[dict[str, Any]] = [
            {
                "params": [master.parameter for master in hidden],
                "lr": spec.lr,
                "momentum": spec.momentum,
                "nesterov": spec.nesterov,
                "ns_steps": spec.ns_steps,
                "adamw_size": spec.scale == "rms",
                "weight_decay": spec.weight_decay,
            },
            *({**group, **options} for group in by_decay(not_hidden, adamw.weight_decay)),
        ]
        super().__init__(masters, groups, {"momentum": spec.momentum})  # schedulers that cycle momentum require it

    def update(self) -> None:
        """Updates hidden matrices by Muon, all others by AdamW."""
        hidden, *adamw_groups = self.param_groups
        for masters in _chunks_by_shape(self.taking_part(hidden["params"])):
            self._update_hidden(masters, hidden)
        for group in adamw_groups:
            self._update_others(group)

    def _update_hidden(self, masters: Sequence[Master], group: dict[str, Any]) -> None:
        """Updates parameters with matrices of one shape that are cut in the same way."""
        cuts = _cuts(masters[0])
        if not cuts:
            masters = [master for master in masters if master.parameter.grad is not None]
            if not masters:
                return
        dtype = compute_dtype(masters[0].local.device)
        stacks = [_stacked(master, self._direction(master, group).to(dtype)) for master in masters]
        lengths, directions = [len(stack) for stack in stacks], torch.cat(stacks)
        del stacks
        site = f"Muon, the matrices of {len(masters)} parameters"
        updates = apply_to_whole(directions, cuts, partial(orthogonalized, steps=group["ns_steps"]), site)
        for master, update in zip(masters, torch.split(updates, lengths), strict=True):
            if master.parameter.grad is not None:
                master.local.mul_(1 - group["lr"] * group["weight_decay"])
                size = -group["lr"] * _factor(master, group["adamw_size"])
                master.local.add_(update.reshape(master.local.shape), alpha=size)

    def _direction(self, master: Master, group: dict[str, Any]) -> Tensor:
        """The momentum after this step's gradient (Nesterov's: one step ahead); zeros before the first gradient."""
        gradient, state = master.take_gradient(self.grad_scale), self.state[master.parameter]
        if gradient is None:
            return local_part(state["momentum_buffer"]) if state else torch.zeros_like(master.local)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(master.parameter, dtype=self.state_dtype)
        with widened([state], "momentum_buffer", self.state_dtype) as (momentum,):
            momentum.lerp_(gradient, 1 - group["momentum"])
            return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _update_others(self, group: dict[str, Any]) -> None:
        options = {name: group[name] for name in ("beta2", "lr", "weight_decay", "eps")}
        options["beta1"] = group["momentum"]
        options["grad_scale"] = self.grad_scale
        for chunk in widened_chunks(group["params"], self.state, MOMENTS, self.state_dtype):
            update_by_adamw(chunk, options)


def _chunks_by_shape(masters: Sequence[Master]) -> Iterator[list[Master]]:
    """Masters with matrices of one shape, cut in the same way, a chunk at a time; equal on every rank."""
    by_kind: dict[tuple[object, ...], list[Master]] = {}
    for master in masters:
        by_kind.setdefault((_matrix_shape(master), *_cuts(master)), []).append(master)
    for kind in by_kind.values():
        yield from chunks(kind)


def _cuts(master: Master) -> list[Cut]:
    """The cuts of a parameter's matrices, innermost first. Cuts of the stack leave matrices whole."""
    inside = ((group, dim) for group, dim in reversed(master.cuts) if dim >= master.matrices.stack)
    return [Cut(group, 1 if dim in master.rows else 2) for group, dim in inside]


def _matrix_shape(master: Master) -> tuple[int, int]:
    """Rows and columns of this rank's parts of the matrices."""
    rows, columns = (math.prod(master.local.shape[d] for d in dims) for dims in (master.rows, master.columns))
    return rows, columns


def _stacked(master: Master, values: Tensor) -> Tensor:
    """Values of this rank's part as `[matrices, rows, columns]`."""
    return values.reshape(-1, *_matrix_shape(master))


def _factor(master: Master, adamw_size: bool) -> float:
    """The factor on an update by Jordan et al. 2024, or by Liu et al. 2025 (arXiv 2502.16982, section 2.2)."""
    rows, columns = master.size(master.rows), master.size(master.columns)
    return 0.2 * math.sqrt(max(rows, columns)) if adamw_size else math.sqrt(max(1.0, rows / columns))
