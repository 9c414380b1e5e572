"""Runs a Program for many ranks in one process, in lockstep, node by node of its graphs.

Compute nodes run once per rank. A collective shuffles the ranks' tensors, with the forward and the backward of the real
operator (`shuffles.py`), so a missing or doubled reduction gives the same gradients as on a cluster.
`tests/distributed` compares each collective with gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, fx

from moec.codegen.emit import LAYER, info_of, recomputed, target_name
from moec.passes.ir import SEED, STEP, Setting, State, Table
from moec.passes.ir.ops import Call
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.inputs.settings import setting_values
from moec.runtime.verify.cluster.prepared_graphs import Graphs, PreparedGraph
from moec.runtime.verify.cluster.recorded import FAILURES, PerRank, RecordedNode, StepError
from moec.runtime.verify.cluster.routes import Routes
from moec.runtime.verify.cluster.shuffles import NODES

VERIFY_SETTINGS: Mapping[str, int] = {SEED.name: 5, STEP.name: 3}
"""The settings under which a plan is verified."""

Watch = Callable[[Literal["forward", "backward"], int, int], None]
"""Called with the direction, the layer and the number of ranks that run it."""
Use = tuple[str, str, str]
"""The module's path, the consumer's key and its operand's key."""


class Lockstep:
    """The `graphs` of a Program, on ranks `0 … world_size - 1`. `weight_of` gives the weight of a full name on each
    rank, at its first use.

    `states` (full name → tensor) are the same on every rank. `recompute` saves only the inputs and choices of each
    layer, as blocks with `recompute = layer` do, for clusters whose activations would not fit. `routes` records
    choices, or replaces them. `data_ranks` are the data-parallel indices of the ranks. `watch` is called for every
    layer. `tables`: the table of each layer that has one. `nodes` is None unless `record` was called.
    """

    def __init__(
        self,
        graphs: Graphs,
        world_size: int,
        groups: Mapping[str, Sequence[Sequence[int]]],
        weight_of: Callable[[str], Sequence[Tensor]],
        *,
        states: Mapping[str, Tensor],
        recompute: bool = False,
        routes: Routes | None = None,
        training: bool = True,
        data_ranks: Sequence[int] | None = None,
        watch: Watch | None = None,
        tables: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.graphs, self.training = graphs, training
        self.ranks = range(world_size)
        self.data_ranks = data_ranks or [0] * world_size
        self.nodes: list[RecordedNode] | None = None
        self.uses: dict[Use, PerRank] = {}
        """Each consumer's view of a value with several consumers: its gradient is that consumer's part."""
        self._groups, self._weight_of, self._states = groups, weight_of, states
        self._recompute, self._routes, self._watch, self._tables = recompute, routes, watch, tables or {}

    def record(self) -> None:
        """From now on keeps all nodes in `self.nodes`, with their gradients."""
        self.nodes, self.uses = [], {}

    def loss(self, logits: Sequence[Tensor], labels: Sequence[Tensor], valid: PerRank | None = None) -> PerRank:
        """The cross-entropy of every rank's logits, without balance terms, divided by `valid`, by default the number of
        valid `labels`."""
        valid = self.scalar("valid_labels", list(labels)) if valid is None else valid
        return self.scalar("loss", list(logits), list(labels), valid)

    def scalar(self, graph: str, *inputs: PerRank) -> PerRank:
        """The result of a graph that gives one scalar, on every rank."""
        (result,) = self.run(self.graphs[graph], f"{graph}.", inputs)
        return result

    def run(self, graph: PreparedGraph, path: str, inputs: Sequence[PerRank]) -> list[PerRank]:
        """The results of a graph of the module at `path`, each on every rank."""
        values: dict[fx.Node, PerRank] = {}
        pending = iter(inputs)
        for node in graph.graph.nodes:
            if node.op == "placeholder" and info_of(node).parameter is not None:
                continue  # read at its first use: then it has been gathered
            for used in node.all_input_nodes:
                if used not in values:
                    values[used] = self._weight(path, used)
                    self._note(path, used, values[used])
            match node.op:
                case "placeholder":
                    values[node] = self._input(path, node, pending)
                case "output":
                    (output,) = node.args
                    return [values[result] for result in (output if isinstance(output, tuple) else (output,))]
                case "call_module":
                    call = info_of(node).op
                    assert isinstance(call, Call)
                    operands = [used for used in node.args if isinstance(used, fx.Node)]
                    arguments = [self._used(path, node, used, values[used]) for used in operands]
                    results = self._call_layer(self.graphs[call.block], f"layers.{call.layer}.", call.layer, arguments)
                    values[node] = results[0] if len(results) == 1 else [list(r) for r in zip(*results, strict=True)]
                case _:
                    values[node] = self._attempt(path, node, values)
            self._note(path, node, values[node])
            for dead in graph.last_used_at.get(node, ()):
                del values[dead]
        raise AssertionError("a graph without an output")

    def _weight(self, path: str, node: fx.Node) -> PerRank:
        try:
            return list(self._weight_of(f"{path}{info_of(node).parameter}"))
        except LookupError as error:
            raise StepError(path, node, error) from error

    def _input(self, path: str, node: fx.Node, pending: Iterator[PerRank]) -> PerRank:
        info = info_of(node)
        if isinstance(info.value, State):
            name = f"{path.removesuffix('update.')}{info.value.name}"
            if name not in self._states:
                raise StepError(path, node, KeyError(f"{name} is no state of the file's model"))
            return [self._states[name]] * len(self.ranks)
        if isinstance(info.value, Setting):
            return [*setting_values((info.value.name,), VERIFY_SETTINGS, training=self.training)] * len(self.ranks)
        if isinstance(info.value, Table):
            return [self._tables[int(path.split(".")[1])]] * len(self.ranks)
        if info.key == LAYER and info.value is None:
            return [torch.tensor(int(path.split(".")[1]), device="cpu")] * len(self.ranks)
        return next(pending)

    def _call_layer(self, graph: PreparedGraph, path: str, layer: int, arguments: Sequence[PerRank]) -> list[PerRank]:
        self._call_watch(layer, arguments)
        if not (self._recompute or graph.recompute == "layer") or self.nodes is not None:
            return self.run(graph, path, arguments)
        size = len(self.ranks)

        def run_flat(*operands: Tensor) -> list[Any]:
            """The layer's results, flattened by rank, of arguments flattened by rank."""
            per_rank = [list(operands[start : start + size]) for start in range(0, len(operands), size)]
            return [*chain(*self.run(graph, path, per_rank))]

        flat = recomputed(run_flat, *chain(*arguments))
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def _call_watch(self, layer: int, arguments: Sequence[PerRank]) -> None:
        """Calls `watch` now, and in backward when the gradient of the layer's input is complete."""
        if self._watch is None:
            return
        watch, ranks = self._watch, len(self.ranks)
        watch("forward", layer, ranks)
        stream = next((value for value in arguments[0] if isinstance(value, Tensor) and value.requires_grad), None)
        if stream is not None:
            stream.register_hook(lambda _: watch("backward", layer, ranks))  # type: ignore[no-untyped-call]

    def _attempt(self, path: str, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        try:
            inputs = {used: self._used(path, node, used, values[used]) for used in node.all_input_nodes}
            results = self._call(node, inputs)
            return results if self._routes is None else self._routes.replace(path, node, inputs, results)
        except FAILURES as error:
            raise StepError(path, node, error) from error

    def _call(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        if target_name(node) in NODES:
            return self._call_in_groups(node, values)
        assert callable(node.target)
        target, results = node.target, []
        for rank in self.ranks:
            args = [_rank_argument(arg, values, rank) for arg in node.args]
            results.append(target(*args, **node.kwargs))
        return results

    def _used(self, path: str, node: fx.Node, used: fx.Node, values: PerRank) -> PerRank:
        """The values for one of several consumers; if nodes are recorded, each consumer gets its own view."""
        if self.nodes is None or len(used.users) < 2:
            return values
        views = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in values]
        for view in views:
            if isinstance(view, Tensor) and view.requires_grad:
                view.retain_grad()
        self.uses[path, info_of(node).key, info_of(used).key] = views
        return views

    def _note(self, path: str, node: fx.Node, values: PerRank) -> None:
        if self.nodes is None:
            return
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                value.retain_grad()
        self.nodes.append(RecordedNode(path, node, values))

    def _call_in_groups(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        operands = [values[arg] for arg in node.args if isinstance(arg, fx.Node)]
        run_node, results = NODES[target_name(node)], list[Any]()
        for group in (arg for arg in node.args if isinstance(arg, str)):
            results = [None for _ in self.ranks]
            for ranks in self._groups[group]:
                inputs = [[operand[rank] for rank in ranks] for operand in operands]
                for rank, result in zip(ranks, run_node(node.args, inputs), strict=True):
                    results[rank] = result
            operands = [results]
        return results


def _rank_argument(arg: Any, values: Mapping[fx.Node, PerRank], rank: int) -> Any:
    if isinstance(arg, list | tuple):
        return [_rank_argument(item, values, rank) for item in arg]
    return values[arg][rank] if isinstance(arg, fx.Node) else arg
