"""The unsharded model or layer of a file, which every plan must equal."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from moec.codegen.plan import parameters_of
from moec.grammar.spec import Spec
from moec.grammar.stated import data_parallel_size
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir import Program
from moec.passes.lower.gates.placed_topology import depends_on_ranks
from moec.passes.lower.lower_model import lower
from moec.runtime.errors import wrong_argument
from moec.runtime.host.layer import MoeLayer
from moec.runtime.host.layer_state import first_of_parts
from moec.runtime.inputs.batches import limits_of
from moec.runtime.model.module import PlanModule
from moec.runtime.weights.home import SingleProcessHome
from moec.runtime.weights.weight_spec import WeightSpec

COMPUTED = (torch.float64, torch.float32, torch.bfloat16)


def reference(spec: Spec, *, seed: int = 0, dtype: torch.dtype | None = None, microbatches: int = 1) -> PlanModule:
    """The lowered, unsharded Program of `spec` as a module, initialised as in a job.

    `module(tokens)` gives `.logits` and `.aux_loss`, with labels also `.loss`. Parameters are fp32. `dtype`
    replaces the dtype in which layers compute; float64 also replaces fp32 inside the graphs and of parameters. Its
    batch consists of `microbatches` equal parts, which share no routing group.
    """
    program = reference_program(spec, microbatches)
    home = SingleProcessHome(parameters_of(program), seed=seed, dtype=dtype)
    return PlanModule(spec, program, limits_of(spec), home, float64=dtype == torch.float64)


def layer_reference(spec: Spec, *, seed: int = 0, dtype: torch.dtype | None = None) -> MoeLayer:
    """The unsharded layer of a `layer` file: `module(x)` gives y and sets `.aux_loss`."""
    program = reference_program(spec)
    home = SingleProcessHostedHome(parameters_of(program), seed=seed, dtype=dtype)
    return MoeLayer(program, spec, home, float64=dtype == torch.float64)


def require_dtype(dtype: object) -> None:
    """Raises `CallError` unless a reference can compute in `dtype`; None is the file's."""
    if dtype not in (None, *COMPUTED):
        words = ", ".join(map(str, COMPUTED))
        raise wrong_argument(f"dtype must be one of {words}, not {dtype!r}", "leave it out for the dtype of the file")


class SingleProcessHostedHome(SingleProcessHome):
    """The home of an unsharded layer."""

    hosts_divisor, ranks, expert_group = 1, (0,), ""

    def as_dtensor(self, name: str, part: Tensor) -> Tensor:
        """`part`, which is the whole parameter."""
        return part

    def weight(self, name: str, site: str) -> WeightSpec:
        return replace(super().weight(name, site), master=None)

    @property
    def local_experts(self) -> range:
        """All experts."""
        return range(sum(p.shape[0] for p in first_of_parts(self._parameters)))


def reference_program(spec: Spec, microbatches: int = 1) -> Program:
    """The lowered Program of `spec`, for one process with the sequences of all ranks and micro-batches."""
    return replace(_lowered(_Itself(spec)), data_ranks=data_parallel_size(spec), microbatches=microbatches)


class _Itself:
    """A Spec as a key: one that is equal may have been written on other lines, which messages name."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.spec is other.spec

    def __hash__(self) -> int:
        return id(self.spec)


@lru_cache(maxsize=2)
def _lowered(of: _Itself) -> Program:
    """The Program of a Spec, kept for the parts of `moec.verify`, which each ask for it."""
    return lower(of.spec, choose_degrees(of.spec) if depends_on_ranks(of.spec) else None)
