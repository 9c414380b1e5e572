"""Runs a stage's graphs for many ranks in one process, in lockstep, node by node.

Compute nodes run once per rank. A collective shuffles the ranks' tensors, with the forward and the backward that the
real operator declares (`moec.runtime.shuffles`), so that a missing or doubled reduction gives the gradients here
that it would give on a cluster. tests/distributed holds each against gloo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from moec.codegen.fx import build_module
from moec.codegen.graph import Node, Ref, StageGraphs
from moec.runtime import operators  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.shuffles import SHUFFLES

PerRank = list[Any]
LOSS = "loss."
"""The path of the steps of the loss graph; it has no parameters."""


@dataclass(frozen=True, slots=True)
class Step:
    """A node that was run: in which module (`layers.1.`), what it is, and what it gave on every rank."""

    path: str
    node: Node
    values: PerRank


class StepError(Exception):
    """A node could not run: its inputs do not fit it, so the plan is wrong before it or in it."""

    def __init__(self, path: str, node: Node, error: Exception) -> None:
        super().__init__(f"{path}{node.name}: {error}")
        self.path, self.node = path, node


class Lockstep:
    """A stage on ranks `0 … world_size - 1`, each with its own `parameters` (full name → tensor of each rank)."""

    def __init__(
        self,
        stage: StageGraphs,
        world_size: int,
        groups: Mapping[str, Sequence[Sequence[int]]],
        parameters: Mapping[str, Sequence[Tensor]],
        *,
        float64: bool,
    ) -> None:
        self.ranks = range(world_size)
        self.steps: list[Step] | None = None
        self.counts: dict[int, PerRank] = {}
        """Rows that each rank's tokens sent to each expert in the last run: layer → `[1, experts]` of every rank."""
        self._groups = groups
        self._parameters = parameters
        self._graphs = Graphs(stage, float64=float64)

    def run(
        self, tokens: Sequence[Tensor], labels: Sequence[Tensor], *, record: bool = False
    ) -> tuple[PerRank, PerRank]:
        """Logits and loss of every rank; `record` keeps every step in `self.steps`, with gradients retained."""
        self.steps = [] if record else None
        forward = self._graphs["forward"]
        named = dict(zip(forward.outputs, self._run(forward, "", [list(tokens)]), strict=True))
        if "logits" not in named:
            output = forward.module.graph.output_node().meta["moec"]
            raise StepError("", output, KeyError("logits"))
        counts = {name: values for name, values in named.items() if name.startswith("counts_")}
        self.counts = {int(name.removeprefix("counts_")): values for name, values in counts.items()}
        inputs = [named["logits"], list(labels)]
        if "balance" in named:
            inputs.append(named["balance"])
        (loss,) = self._run(self._graphs["loss"], LOSS, inputs)
        return named["logits"], loss

    def _run(self, graph: PreparedGraph, path: str, inputs: Sequence[PerRank]) -> list[PerRank]:
        values: dict[str, PerRank] = {}
        given = iter(inputs)
        for node in graph.module.graph.nodes:
            data: Node = node.meta["moec"]
            match node.op:
                case "placeholder":
                    values[node.name] = next(given)
                case "get_attr":
                    values[node.name] = list(self._parameters[path.removeprefix(LOSS) + data.target])
                case "output":
                    return [values[name] for name in graph.outputs]
                case "call_module":
                    assert data.graph is not None
                    arguments = [values[arg.name] for arg in node.args]
                    results = self._run(self._graphs[data.graph], f"{path}{data.target}.", arguments)
                    values[node.name] = (
                        results[0] if len(results) == 1 else [list(r) for r in zip(*results, strict=True)]
                    )
                case _:
                    values[node.name] = self._attempt(path, node, data, values)
            self._note(path, data, values[node.name])
            for dead in graph.last_used_at.get(node.name, ()):
                del values[dead]
        raise AssertionError("a graph without an output")

    def _attempt(self, path: str, node: fx.Node, data: Node, values: Mapping[str, PerRank]) -> PerRank:
        try:
            return self._call(node, data, values)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise StepError(path, data, error) from error

    def _call(self, node: fx.Node, data: Node, values: Mapping[str, PerRank]) -> PerRank:
        if data.target in SHUFFLES:
            return self._collective(node, data, values)
        results = []
        for rank in self.ranks:

            def local(used: fx.Node, rank: int = rank) -> Any:
                return values[used.name][rank]

            args, kwargs = fx.map_arg((node.args, node.kwargs), local)
            assert callable(node.target)
            results.append(node.target(*args, **kwargs))
        return results

    def _note(self, path: str, data: Node, values: PerRank) -> None:
        if self.steps is None:
            return
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                value.retain_grad()
        self.steps.append(Step(path, data, values))

    def _collective(self, node: fx.Node, data: Node, values: Mapping[str, PerRank]) -> PerRank:
        operands = [values[arg.name] for arg in node.args if isinstance(arg, fx.Node)]
        group = next(arg for arg in data.args if isinstance(arg, str))
        results: PerRank = [None for _ in self.ranks]
        for ranks in self._groups[group]:
            inputs = [[operand[rank] for rank in ranks] for operand in operands]
            for rank, result in zip(ranks, SHUFFLES[data.target](data, inputs), strict=True):
                results[rank] = result
        return results


# ---- graphs, prepared ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    """A graph with what interpreting it needs: its outputs' names, and which values die at each node."""

    module: fx.GraphModule
    outputs: tuple[str, ...]
    last_used_at: Mapping[str, tuple[str, ...]]


class Graphs:
    """A stage's graphs as FX, each built once and without parameters."""

    def __init__(self, stage: StageGraphs, *, float64: bool) -> None:
        self._stage, self._float64 = stage, float64
        self._built: dict[str, PreparedGraph] = {}

    def __getitem__(self, name: str) -> PreparedGraph:
        if name not in self._built:
            module = build_module(self._stage, name, lambda _: nn.Parameter(torch.empty(0)), float64=self._float64)
            outputs = tuple(arg.node for arg in self._stage.graph(name).nodes[-1].args if isinstance(arg, Ref))
            self._built[name] = PreparedGraph(module, outputs, _last_uses(module))
        return self._built[name]


def _last_uses(module: fx.GraphModule) -> Mapping[str, tuple[str, ...]]:
    dead: dict[str, list[str]] = {}
    seen: set[str] = set()
    for node in reversed(module.graph.nodes):
        for used in node.all_input_nodes:
            if used.name not in seen:
                seen.add(used.name)
                dead.setdefault(node.name, []).append(used.name)
    return {name: tuple(names) for name, names in dead.items()}
