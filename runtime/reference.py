"""The model as its file says it, unsharded: what every plan must equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from moec.codegen.emit import emit
from moec.codegen.fx import DTYPES
from moec.codegen.graph import StageGraphs
from moec.codegen.plan import ParameterData, parameters_of
from moec.grammar.spec import Spec
from moec.passes.ir import Mesh
from moec.passes.lower import context_of, lower
from moec.runtime.module import PlanModule
from moec.runtime.shards import initial_shard

ALONE = Mesh("dense", (("dp", 1),))


def reference(spec: Spec, *, seed: int = 0, dtype: torch.dtype | None = None) -> PlanModule:
    """The lowered, unsharded Program of `spec` as a module, initialised as a job's is.

    `module(tokens)` gives `.logits`, `module(tokens, labels)` also `.loss`. `dtype` replaces every floating dtype of
    the file, those inside the graph too where it is float64.
    """
    stage, parameters = reference_stage(spec)

    def make(name: str) -> nn.Parameter:
        data = parameters[name]
        return nn.Parameter(initial_shard(name, data, ALONE, 0, seed=seed, dtype=dtype or DTYPES[data.dtype]))

    return PlanModule(spec.model, context_of(spec), stage, make, float64=dtype == torch.float64)


def reference_stage(spec: Spec) -> tuple[StageGraphs, Mapping[str, ParameterData]]:
    """The unsharded graphs of `spec`, and its parameters by full name."""
    program = lower(spec)
    (stage,) = emit(program)
    return stage, parameters_of(program)
