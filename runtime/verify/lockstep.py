"""Runs a Program for many ranks in one process, in lockstep, node by node of its graphs.

Compute nodes run once per rank. A collective shuffles the ranks' tensors, with the forward and the backward that the
real operator declares (`moec.runtime.verify.shuffles`), so that a missing or doubled reduction gives the gradients here
that it would give on a cluster. tests/distributed holds each against gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from moec.codegen.emit import LAYER, emit_graph, facts_of, target_name
from moec.passes.ir import Op, Output, Program, Role, Setting, Value
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import Call
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.job.settings import setting_values
from moec.runtime.verify.routes import ROUTE, Routes
from moec.runtime.verify.shuffles import SHUFFLES

PerRank = list[Any]
Use = tuple[str, str, str]
"""The path of the module, the consumer's key and the key of what it uses there."""


@dataclass(frozen=True, slots=True)
class Step:
    """A node that was run: in which module (`layers.1.`), and what it gave on every rank."""

    path: str
    node: fx.Node
    values: PerRank

    @property
    def key(self) -> str:
        """The node's name in its block."""
        return facts_of(self.node).key

    @property
    def op(self) -> Op | None:
        """The op that it is a part of; none for inputs and parameters."""
        return facts_of(self.node).op

    @property
    def value(self) -> Value | None:
        """The Program's value or parameter that it gives, if it gives one."""
        return facts_of(self.node).value

    @property
    def used(self) -> list[str]:
        """The keys of the nodes that it uses."""
        return [facts_of(node).key for node in self.node.all_input_nodes]


FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, ArithmeticError)
"""What operators raise where their inputs do not fit them."""


class StepError(Exception):
    """A node could not run: its inputs do not fit it, so the plan is wrong before it or in it."""

    def __init__(self, path: str, node: fx.Node, error: Exception) -> None:
        facts = facts_of(node)
        value = facts.value or (facts.op.results[0] if facts.op is not None else None)
        super().__init__(f"{path}{value.name if value is not None else facts.key}: {error}")
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
    """A Program on ranks `0 … world_size - 1`, each with its own `parameters` (full name → tensor of each rank).

    `recompute` keeps of each layer what goes into it, and runs it again for its gradients: for clusters whose
    activations would not fit. `routes` takes the place of `moec::route`. `graphs` are the Program's
    as another run has built them.
    """

    def __init__(
        self,
        program: Program,
        world_size: int,
        groups: Mapping[str, Sequence[Sequence[int]]],
        parameters: Mapping[str, Sequence[Tensor]],
        *,
        float64: bool,
        recompute: bool = False,
        routes: Routes | None = None,
        graphs: Graphs | None = None,
        training: bool = True,
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
        """Scalars that should be equal on all ranks: a model's `loss`, with balance terms, or a layer's `aux_loss`."""
        self._groups = groups
        self._parameters = parameters
        self._recompute = recompute
        self._training = training
        self._routes = routes
        self._graphs = graphs or Graphs(program, float64=float64)

    def run(
        self, given: Sequence[Tensor], targets: Sequence[Tensor], *, record: bool = False
    ) -> tuple[PerRank, PerRank]:
        """Logits and training loss of every rank, from its tokens and labels.

        A layer is given x and a cotangent of y; then it is y, and `(y * cotangent).sum()` plus `aux_loss`.
        `record` keeps all steps in `self.steps`, with gradients retained.
        """
        self.steps, self.uses = [] if record else None, {}
        forward = self._graphs[FORWARD]
        found = list(zip(forward.results, self._run(forward, "", [list(given)]), strict=True))
        counts = (each for each in found if each[0].role == "counts")
        self.counts = {output.layer: rows for output, rows in counts if output.layer is not None}
        of_role: dict[Role, PerRank] = {output.role: values for output, values in found if output.layer is None}
        result: Role = "residual" if any(x.is_floating_point() for x in given) else "logits"
        wanted: set[Role] = {result, "balance"} if self._graphs.has("aux_loss") else {result}
        if missing := wanted.difference(of_role):
            raise StepError("", forward.output, KeyError(", ".join(sorted(missing))))
        self.losses = {"loss": self.loss(of_role[result], targets)} if result == "logits" else {}
        if "balance" in wanted:
            num_tokens = self._scalar("num_tokens", [each.detach() for each in given])
            self.losses["aux_loss"] = self._scalar("aux_loss", of_role["balance"], num_tokens)
        if result == "logits":
            loss = _sums(*self.losses.values())
            self.scalars = {"loss": loss}
            return of_role[result], loss
        self.scalars = dict(self.losses)
        return of_role[result], _sums(self._products(of_role[result], targets), *self.losses.values())

    def _products(self, y: PerRank, cotangents: Sequence[Tensor]) -> PerRank:
        """`(y * cotangent).sum()` of every rank, in at least fp32. The gradient of y is the cotangent, exactly."""
        for value, cotangent in zip(y, cotangents, strict=True):
            if not isinstance(value, Tensor) or value.shape != cotangent.shape:
                output = self._graphs[FORWARD].output
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
        values: dict[fx.Node, PerRank] = {}
        given = iter(inputs)
        for node in graph.graph.nodes:
            match node.op:
                case "placeholder":
                    values[node] = self._input(path, node, given)
                case "output":
                    (found,) = node.args
                    return [values[each] for each in (found if isinstance(found, tuple) else (found,))]
                case "call_module":
                    call = facts_of(node).op
                    assert isinstance(call, Call)
                    given_here = [used for used in node.args if isinstance(used, fx.Node)]
                    arguments = [self._used(path, node, used, values[used]) for used in given_here]
                    results = self._call_layer(self._graphs[call.block], f"layers.{call.layer}.", arguments)
                    values[node] = results[0] if len(results) == 1 else [list(r) for r in zip(*results, strict=True)]
                case _:
                    values[node] = self._attempt(path, node, values)
            self._note(path, node, values[node])
            for dead in graph.last_used_at.get(node, ()):
                del values[dead]
        raise AssertionError("a graph without an output")

    def _input(self, path: str, node: fx.Node, given: Iterator[PerRank]) -> PerRank:
        facts = facts_of(node)
        if facts.parameter is not None:
            return list(self._parameters[path + facts.parameter])
        if isinstance(facts.value, Setting):
            return [*setting_values((facts.value.name,), training=self._training)] * len(self.ranks)
        if facts.key == LAYER and facts.value is None:
            return [torch.tensor(int(path.split(".")[1]), device="cpu")] * len(self.ranks)
        return next(given)

    def _call_layer(self, graph: PreparedGraph, path: str, arguments: Sequence[PerRank]) -> list[PerRank]:
        if not self._recompute or self.steps is not None:
            return self._run(graph, path, arguments)
        flat = list(_Recomputed.apply(lambda given: self._flat(graph, path, given), *chain(*arguments)))  # type: ignore[no-untyped-call]
        return [flat[start : start + len(self.ranks)] for start in range(0, len(flat), len(self.ranks))]

    def _flat(self, graph: PreparedGraph, path: str, given: Sequence[Tensor]) -> list[Any]:
        """The results of a layer, one rank after the other, of arguments that lie so too."""
        size = len(self.ranks)
        arguments = [list(given[start : start + size]) for start in range(0, len(given), size)]
        return [*chain(*self._run(graph, path, arguments))]

    def _attempt(self, path: str, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        try:
            given = {used: self._used(path, node, used, values[used]) for used in node.all_input_nodes}
            if self._routes is not None and target_name(node) == ROUTE:
                (logits,), how = given.values(), node.args[1:]
                return [self._routes(path, rank, logits[rank], *how) for rank in self.ranks]  # type: ignore[arg-type]
            return self._call(node, given)
        except FAILURES as error:
            raise StepError(path, node, error) from error

    def _call(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        if target_name(node) in SHUFFLES:
            return self._collective(node, values)
        assert callable(node.target)
        target, results = node.target, []
        for rank in self.ranks:
            args = [values[arg][rank] if isinstance(arg, fx.Node) else arg for arg in node.args]
            results.append(target(*args, **node.kwargs))
        return results

    def _used(self, path: str, node: fx.Node, used: fx.Node, values: PerRank) -> PerRank:
        """The values for one of several consumers; where steps are recorded, each has its own view of them."""
        if self.steps is None or len(used.users) < 2:
            return values
        own = [value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value for value in values]
        for view in own:
            if isinstance(view, Tensor) and view.requires_grad:
                view.retain_grad()
        self.uses[path, facts_of(node).key, facts_of(used).key] = own
        return own

    def _note(self, path: str, node: fx.Node, values: PerRank) -> None:
        if self.steps is None:
            return
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                value.retain_grad()
        self.steps.append(Step(path, node, values))

    def _collective(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        operands = [values[arg] for arg in node.args if isinstance(arg, fx.Node)]
        group = next(arg for arg in node.args if isinstance(arg, str))
        shuffle, results = SHUFFLES[target_name(node)], [None for _ in self.ranks]
        for ranks in self._groups[group]:
            inputs = [[operand[rank] for rank in ranks] for operand in operands]
            for rank, result in zip(ranks, shuffle(node.args, inputs), strict=True):
                results[rank] = result
        return results


def _sums(*terms: PerRank) -> PerRank:
    """The sum of several values on every rank."""
    return [sum(of_rank) for of_rank in zip(*terms, strict=True)]


# ---- graphs, prepared ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    """A graph with what running it needs: what its results are, its output, and which values die at each node."""

    graph: fx.Graph
    results: tuple[Output, ...]
    output: fx.Node
    last_used_at: Mapping[fx.Node, tuple[fx.Node, ...]]


class Graphs:
    """A Program's graphs, each built once."""

    def __init__(self, program: Program, *, float64: bool) -> None:
        self.program, self._float64 = program, float64
        self._built: dict[str, PreparedGraph] = {}

    def has(self, name: str) -> bool:
        """Whether there is a block called `name` beside `forward`."""
        return name in self.program.block_map

    def __getitem__(self, name: str) -> PreparedGraph:
        if name not in self._built:
            block = self.program.block(name)
            graph = emit_graph(self.program, block, float64=self._float64)
            self._built[name] = PreparedGraph(graph, block.outputs, graph.output_node(), _last_uses(graph))
        return self._built[name]


def _last_uses(graph: fx.Graph) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
    dead: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                dead.setdefault(node, []).append(used)
    return {node: tuple(used) for node, used in dead.items()}
