"""The model as its file says it, unsharded: what every plan must equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moec.codegen.emit import emit
from moec.codegen.graph import StageGraphs
from moec.codegen.plan import ParameterData, parameters_of
from moec.grammar.spec import Spec
from moec.passes.ir import Program
from moec.passes.lower import lower
from moec.runtime.batches import limits_of
from moec.runtime.home import ALONE, Alone
from moec.runtime.layer import MoeLayer
from moec.runtime.layer_state import PREFIX
from moec.runtime.module import PlanModule

__all__ = ["ALONE", "reference", "reference_stage"]


def reference(spec: Spec, *, seed: int = 0, dtype: torch.dtype | None = None) -> PlanModule:
    """The lowered, unsharded Program of `spec` as a module, initialised as a job's is.

    `module(tokens)` gives `.logits` and `.aux_loss`, with labels also `.loss`. Parameters are fp32. `dtype`
    replaces the dtype in which layers compute, inside the graphs too where it is float64; then parameters have it too.
    """
    program = lower(spec)
    stage, parameters = _emitted(program)
    home = Alone(parameters, seed=seed, dtype=dtype)
    return PlanModule(stage, limits_of(spec), home, float64=dtype == torch.float64)


def layer_reference(spec: Spec, *, seed: int = 0, dtype: torch.dtype | None = None) -> MoeLayer:
    """The same of a `layer` file: `module(x)` gives y, and `.aux_loss` after it."""
    stage, parameters = reference_stage(spec)
    home = AloneInHost(parameters, seed=seed, dtype=dtype)
    return MoeLayer(stage, spec.subject.dim, home, float64=dtype == torch.float64)


class AloneInHost(Alone):
    """The home of a layer that one process has whole."""

    hosts_divisor, ranks = 1, (0,)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A parameter, which is whole."""
        return part

    @property
    def local_experts(self) -> range:
        """All of them."""
        return range(self._parameters[f"{PREFIX}experts.up.weight"].shape[0])


def reference_stage(spec: Spec) -> tuple[StageGraphs, Mapping[str, ParameterData]]:
    """The unsharded graphs of `spec`, and its parameters by full name."""
    return _emitted(lower(spec))


def _emitted(program: Program) -> tuple[StageGraphs, Mapping[str, ParameterData]]:
    (stage,) = emit(program)
    return stage, parameters_of(program)
