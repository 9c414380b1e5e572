"""Runs a stage's graphs for many ranks in one process, in lockstep, node by node.

Compute nodes run once per rank. A collective shuffles the ranks' tensors, with the forward and the backward that the
real operator declares (`moec.runtime.shuffles`), so that a missing or doubled reduction gives the gradients here
that it would give on a cluster. tests/distributed holds each against gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from moec.codegen.fx import build_module
from moec.codegen.graph import LAYER_RESULT, MODEL_RESULT, Node, Ref, StageGraphs
from moec.runtime import operators  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.routes import ROUTE, Routes
from moec.runtime.shuffles import SHUFFLES

PerRank = list[Any]
Use = tuple[str, str, str]
"""The path of the module, the consumer's name and the name of what it uses there."""

LOSS_PATHS = ("valid_labels.", "loss.", "num_tokens.", "aux_loss.")
"""The paths of the steps of the graphs beside `forward`, which have no parameters."""


@dataclass(frozen=True, slots=True)
class Step:
    """A node that was run: in which module (`layers.1.`), what it is, and what it gave on every rank."""

    path: str
    node: Node
    values: PerRank


FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, ArithmeticError)
"""What operators raise where their inputs do not fit them."""


def parameter_name(path: str, node: Node) -> str:
    """The full name of the parameter that a node of the module at `path` fetches."""
    return node.target if path in LOSS_PATHS else path + node.target


class StepError(Exception):
    """A node could not run: its inputs do not fit it, so the plan is wrong before it or in it."""

    def __init__(self, path: str, node: Node, error: Exception) -> None:
        super().__init__(f"{path}{node.name}: {error}")
        self.path, self.node = path, node


class BackwardError(Exception):
    """The backward pass could not run to its end: an op's gradient does not fit what it was given."""


class _Recomputed(torch.autograd.Function):
    """A layer on all ranks, of which only what goes into it is kept; backward runs it again."""

    @staticmethod
    def forward(ctx: Any, layer: Callable[[Sequence[Tensor]], list[Any]], *given: Tensor) -> tuple[Any, ...]:
        ctx.layer = layer
        ctx.save_for_backward(*given)
        return tuple(layer(given))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        given = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            results = ctx.layer(given)
        pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if isinstance(r, Tensor) and r.requires_grad]
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        return (None, *(x.grad for x in given))


class Lockstep:
    """A stage on ranks `0 … world_size - 1`, each with its own `parameters` (full name → tensor of each rank).

    `recompute` keeps of each layer what goes into it, and runs it again for its gradients: for clusters whose
    activations would not fit. `routes` takes the place of `moec::route`. `graphs` are the stage's
    as another run has built them, which takes longer than to run a small model.
    """

    def __init__(
        self,
        stage: StageGraphs,
        world_size: int,
        groups: Mapping[str, Sequence[Sequence[int]]],
        parameters: Mapping[str, Sequence[Tensor]],
        *,
        float64: bool,
        recompute: bool = False,
        routes: Routes | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.ranks = range(world_size)
        self.steps: list[Step] | None = None
        self.uses: dict[Use, PerRank] = {}
        """What each rank's consumer was given of a value that has several: a tensor with that consumer's gradient."""
        self.counts: dict[int, PerRank] = {}
        """Rows that each rank's tokens sent to each expert in the last run: layer → `[1, experts]` of every rank."""
        self.losses: dict[str, PerRank] = {}
        """The terms of the last run's loss on every rank, by the graph that gives them."""
        self.scalars: dict[str, PerRank] = {}
        """What every rank should have alike: a model's `loss`, with the balance terms, or a layer's `aux_loss`."""
        self._groups = groups
        self._parameters = parameters
        self._recompute = recompute
        self._routes = routes
        self._graphs = graphs or Graphs(stage, float64=float64)

    def run(
        self, given: Sequence[Tensor], targets: Sequence[Tensor], *, record: bool = False
    ) -> tuple[PerRank, PerRank]:
        """Logits and training loss of every rank, from its tokens and labels.

        A layer is given x and a cotangent of y; then it is y, and `(y * cotangent).sum()` plus `aux_loss`.
        `record` keeps all steps in `self.steps`, with gradients retained.
        """
        self.steps, self.uses = [] if record else None, {}
        forward = self._graphs["forward"]
        named = dict(zip(forward.outputs, self._run(forward, "", [list(given)]), strict=True))
        counts = {name: values for name, values in named.items() if name.startswith("counts_")}
        self.counts = {int(name.removeprefix("counts_")): values for name, values in counts.items()}
        result = LAYER_RESULT if any(x.is_floating_point() for x in given) else MODEL_RESULT
        wanted = {result, "balance"} if self._graphs.has("aux_loss") else {result}
        if missing := wanted.difference(forward.outputs):
            output = forward.module.graph.output_node().meta["moec"]
            raise StepError("", output, KeyError(", ".join(sorted(missing))))
        self.losses = {"loss": self.loss(named[result], targets)} if result == MODEL_RESULT else {}
        if "balance" in wanted:
            num_tokens = self._scalar("num_tokens", [each.detach() for each in given])
            self.losses["aux_loss"] = self._scalar("aux_loss", named["balance"], num_tokens)
        if result == MODEL_RESULT:
            loss = _sums(*self.losses.values())
            self.scalars = {"loss": loss}
            return named[result], loss
        self.scalars = dict(self.losses)
        return named[result], _sums(self._products(named[result], targets), *self.losses.values())

    def _products(self, y: PerRank, cotangents: Sequence[Tensor]) -> PerRank:
        """`(y * cotangent).sum()` of every rank, in at least fp32. The gradient of y is the cotangent, exactly."""
        for value, cotangent in zip(y, cotangents, strict=True):
            if not isinstance(value, Tensor) or value.shape != cotangent.shape:
                output = self._graphs["forward"].module.graph.output_node().meta["moec"]
                raise StepError("", output, ValueError(f"y has another shape than x, {list(cotangent.shape)}"))
        wide = torch.promote_types(cotangents[0].dtype, torch.float32)
        return [(value.to(wide) * cotangent).sum() for value, cotangent in zip(y, cotangents, strict=True)]

    def loss(self, logits: Sequence[Tensor], labels: Sequence[Tensor]) -> PerRank:
        """The cross-entropy of every rank's logits, without the balance terms."""
        valid = self._scalar("valid_labels", list(labels))
        return self._scalar("loss", list(logits), list(labels), valid)

    def _scalar(self, graph: str, *inputs: PerRank) -> PerRank:
        (result,) = self._run(self._graphs[graph], f"{graph}.", inputs)
        return result

    def _run(self, graph: PreparedGraph, path: str, inputs: Sequence[PerRank]) -> list[PerRank]:
        values: dict[str, PerRank] = {}
        given = iter(inputs)
        for node in graph.module.graph.nodes:
            data: Node = node.meta["moec"]
            match node.op:
                case "placeholder":
                    values[node.name] = next(given)
                case "get_attr":
                    values[node.name] = list(self._parameters[parameter_name(path, data)])
                case "output":
                    return [values[name] for name in graph.outputs]
                case "call_module":
                    assert data.graph is not None
                    arguments = [self._used(path, data, arg, values[arg.name]) for arg in node.args]
                    results = self._call_module(self._graphs[data.graph], f"{path}{data.target}.", arguments)
                    values[node.name] = (
                        results[0] if len(results) == 1 else [list(r) for r in zip(*results, strict=True)]
                    )
                case _:
                    values[node.name] = self._attempt(path, node, data, values)
            self._note(path, data, values[node.name])
            for dead in graph.last_used_at.get(node.name, ()):
                del values[dead]
        raise AssertionError("a graph without an output")

    def _call_module(self, graph: PreparedGraph, path: str, arguments: Sequence[PerRank]) -> list[PerRank]:
        if not self._recompute or self.steps is not None or path.count(".") != 2:
            return self._run(graph, path, arguments)
        flat = list(_Recomputed.apply(lambda given: self._flat(graph, path, given), *chain(*arguments)))  # type: ignore[no-untyped-call]
        return [flat[start : start + len(self.ranks)] for start in range(0, len(flat), len(self.ranks))]

    def _flat(self, graph: PreparedGraph, path: str, given: Sequence[Tensor]) -> list[Any]:
        """The results of a layer, one rank after the other, of arguments that lie so too."""
        size = len(self.ranks)
        arguments = [list(given[start : start + size]) for start in range(0, len(given), size)]
        return [*chain(*self._run(graph, path, arguments))]

    def _attempt(self, path: str, node: fx.Node, data: Node, values: Mapping[str, PerRank]) -> PerRank:
        try:
            given = {used.name: self._used(path, data, used, values[used.name]) for used in node.all_input_nodes}
            if self._routes is not None and data.target == ROUTE:
                (logits,), how = given.values(), data.args[1:]
                return [self._routes(path, rank, logits[rank], *how) for rank in self.ranks]  # type: ignore[arg-type]
            return self._call(node, data, given)
        except FAILURES as error:
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

    def _used(self, path: str, data: Node, used: fx.Node, values: PerRank) -> PerRank:
        """The values for one of several consumers; where steps are recorded, each has its own view of them."""
        if self.steps is None or len(used.users) < 2:
            return values
        own = [value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value for value in values]
        for view in own:
            if isinstance(view, Tensor) and view.requires_grad:
                view.retain_grad()
        self.uses[path, data.name, used.name] = own
        return own

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


def _sums(*terms: PerRank) -> PerRank:
    """The sum of several values on every rank."""
    return [sum(of_rank) for of_rank in zip(*terms, strict=True)]


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
        self.stage, self._float64 = stage, float64
        self._built: dict[str, PreparedGraph] = {}

    def has(self, name: str) -> bool:
        """Whether the stage has a graph called `name`."""
        return name in self.stage.by_name()

    def __getitem__(self, name: str) -> PreparedGraph:
        if name not in self._built:
            module = build_module(self.stage, name, lambda _: nn.Parameter(torch.empty(0)), float64=self._float64)
            outputs = tuple(arg.node for arg in self.stage.graph(name).nodes[-1].args if isinstance(arg, Ref))
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
