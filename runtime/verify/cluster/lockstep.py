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
from moec.passes.ir import SEED, STEP, OutputKey, Role, Setting, State
from moec.passes.ir.interface import COUNTS, FORWARD, layer_calls, result_role
from moec.passes.ir.ops import Call
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.inputs.settings import setting_values
from moec.runtime.model.step_counts import sequence_numbers
from moec.runtime.verify.cluster.prepared_graphs import Graphs, PreparedGraph
from moec.runtime.verify.cluster.recorded import FAILURES, PerRank, RecordedNode, StepError
from moec.runtime.verify.cluster.routes import Routes
from moec.runtime.verify.cluster.shuffles import SHUFFLES

VERIFY_SETTINGS: Mapping[str, int] = {SEED.name: 5, STEP.name: 3}
"""The settings under which a plan is verified."""

Watch = Callable[[Literal["forward", "backward"], int, int], None]
"""Called with the direction, the layer and the number of ranks that run it."""
Loads = Mapping[int, Tensor]
_NOTHING: Mapping[Role, Sequence[Tensor]] = {}
Use = tuple[str, str, str]
"""The module's path, the consumer's key and its operand's key."""


class Lockstep:
    """The `graphs` of a Program, on ranks `0 … world_size - 1`. `parameters` maps a full name to each rank's tensor.

    `states` (full name → tensor) are whole on every rank. `recompute` saves only the inputs and choices
    of each layer, as blocks with `recompute = layer` do, for clusters whose activations would not fit. `routes` records
    choices, or replaces them. `data_ranks` are the data-parallel indices of the ranks. `watch` is called for every
    layer.
    """

    def __init__(
        self,
        graphs: Graphs,
        world_size: int,
        groups: Mapping[str, Sequence[Sequence[int]]],
        parameters: Mapping[str, Sequence[Tensor]],
        *,
        states: Mapping[str, Tensor],
        recompute: bool = False,
        routes: Routes | None = None,
        training: bool = True,
        data_ranks: Sequence[int] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.ranks = range(world_size)
        self._data_ranks = data_ranks or [0] * world_size
        self.steps: list[RecordedNode] | None = None
        self.uses: dict[Use, PerRank] = {}
        """Each consumer's view of a value with several consumers: its gradient is that consumer's part."""
        self.counts: dict[Role, dict[int, PerRank]] = {}
        """What layers counted of each rank's tokens in the last run, by role: layer → `[1, …]` of every rank."""
        self.routes: PerRank | None = None
        """The routes of each rank's tokens in the last run; None of a model that gives none."""
        self.losses: dict[str, PerRank] = {}
        """The terms of the last run's loss on every rank, by the name of their graph."""
        self.scalars: dict[str, PerRank] = {}
        """Scalars that should be equal on all ranks: a model's `loss`, with balance terms, or a layer's `aux_loss`."""
        self.new_states: dict[str, PerRank] = {}
        """The new values of states that the last run gave on every rank, by full name."""
        self._groups = groups
        self.parameters, self._states = parameters, states
        self._recompute = recompute
        self._training = training
        self._routes = routes
        self._graphs = graphs
        self._watch = watch

    def run(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        loads: Loads | None = None,
        record: bool = False,
        microbatches: int = 1,
        beside: Mapping[Role, Sequence[Tensor]] = _NOTHING,
    ) -> tuple[PerRank, PerRank]:
        """Logits and training loss of every rank, from its tokens and labels.

        For a layer: y and `(y * cotangent).sum()` plus `aux_loss`, from x and a cotangent of y.
        In training `loads`, the expert loads of each rank `[ranks, experts]` by layer, give states new values.
        `beside` has the other inputs of `forward` by role, of every rank.
        `record` keeps all steps in `self.steps`, with their gradients. Each of the `microbatches` has equally many of a
        rank's sequences; its loss is divided by the counts of the whole step.
        """
        self.steps, self.uses = [] if record else None, {}
        parts = [[x.tensor_split(microbatches) for x in each] for each in (inputs, targets)]
        given, wanted = ([list(part) for part in zip(*each, strict=True)] for each in parts)
        others = {role: [each.tensor_split(microbatches) for each in ranks] for role, ranks in beside.items()}
        outputs = [
            self._forward(part, index, {role: [cut[index] for cut in ranks] for role, ranks in others.items()})
            for index, part in enumerate(given)
        ]
        self.counts = {
            counted: {
                output.layer: _sums(*(found[output.key] for found in outputs))
                for output in self._graphs[FORWARD].results
                if output.role == counted and output.layer is not None
            }
            for counted in COUNTS
        }
        self.new_states = self._updated(loads or {}) if self._training else {}
        role = result_role(self._graphs.program)
        results = [found[role, None, None] for found in outputs]
        routes = [found["routes", None, None] for found in outputs if ("routes", None, None) in found]
        self.routes = [torch.cat(parts) for parts in zip(*routes, strict=True)] if routes else None
        self.losses = {}
        if role == "logits":
            valid = self._scalar("valid_labels", list(targets))
            self.losses["loss"] = _sums(*(self.loss(*pair, valid) for pair in zip(results, wanted, strict=True)))
        if self._graphs.has("aux_loss"):
            count = self._scalar("num_tokens", list(beside.get("real", ())) or [x.detach() for x in inputs])
            balances = (found["balance", None, None] for found in outputs)
            self.losses["aux_loss"] = _sums(*(self._scalar("aux_loss", balance, count) for balance in balances))
        whole = results[0] if microbatches == 1 else [torch.cat(parts) for parts in zip(*results, strict=True)]
        if role == "logits":
            loss = _sums(*self.losses.values())
            self.scalars = {"loss": loss}
            return whole, loss
        self.scalars = dict(self.losses)
        return whole, _sums(self._products(whole, targets), *self.losses.values())

    def _forward(self, inputs: PerRank, index: int, beside: Mapping[Role, PerRank]) -> dict[OutputKey, PerRank]:
        """The results of the forward pass of micro-batch `index`, by `Output.key`.

        Sequences are numbered as rows of the reference's batch (`moec.runtime.verify.inputs`).
        """
        forward, operands = self._graphs[FORWARD], [inputs]
        for value in self._graphs.program.block(FORWARD).inputs[1:]:
            if value.role == "sequences":
                before = index * (max(self._data_ranks) + 1)
                sizes = zip(self._data_ranks, map(len, inputs), strict=True)
                operands.append([sequence_numbers(before + rank, size, size) for rank, size in sizes])
            else:
                assert value.role is not None
                operands.append(list(beside[value.role]))
        found = {o.key: values for o, values in zip(forward.results, self._run(forward, "", operands), strict=True)}
        role = result_role(self._graphs.program)
        roles: list[Role] = [role, "balance"] if self._graphs.has("aux_loss") else [role]
        if missing := [each for each in roles if (each, None, None) not in found]:
            raise StepError("", forward.output, KeyError(", ".join(sorted(missing))))
        return found

    def _products(self, y: PerRank, cotangents: Sequence[Tensor]) -> PerRank:
        """`(y * cotangent).sum()` of every rank, in at least fp32. The gradient of y is the cotangent, exactly."""
        for value, cotangent in zip(y, cotangents, strict=True):
            if not isinstance(value, Tensor) or value.shape != cotangent.shape:
                output = self._graphs[FORWARD].output
                raise StepError("", output, ValueError(f"y has another shape than x, {list(cotangent.shape)}"))
        wide = torch.promote_types(cotangents[0].dtype, torch.float32)
        return [(value.to(wide) * cotangent).sum() for value, cotangent in zip(y, cotangents, strict=True)]

    def _updated(self, loads: Loads) -> dict[str, PerRank]:
        """The new values of states, by full name."""
        found = {}
        for call in layer_calls(self._graphs.program):
            update = self._graphs.program.block(call.block).update
            if update is not None and call.layer in loads:
                graph, counts = self._graphs[update], [*torch.split(loads[call.layer], 1)]
                given = self._run(graph, f"layers.{call.layer}.update.", [counts])
                found.update({f"layers.{call.layer}.{o.state}": v for o, v in zip(graph.results, given, strict=True)})
        return found

    def loss(self, logits: Sequence[Tensor], labels: Sequence[Tensor], valid: PerRank | None = None) -> PerRank:
        """The cross-entropy of every rank's logits, without balance terms, over `valid` labels, by default these."""
        valid = self._scalar("valid_labels", list(labels)) if valid is None else valid
        return self._scalar("loss", list(logits), list(labels), valid)

    def _scalar(self, graph: str, *inputs: PerRank) -> PerRank:
        (result,) = self._run(self._graphs[graph], f"{graph}.", inputs)
        return result

    def _run(self, graph: PreparedGraph, path: str, inputs: Sequence[PerRank]) -> list[PerRank]:
        values: dict[fx.Node, PerRank] = {}
        pending = iter(inputs)
        for node in graph.graph.nodes:
            match node.op:
                case "placeholder":
                    values[node] = self._input(path, node, pending)
                case "output":
                    (output,) = node.args
                    return [values[each] for each in (output if isinstance(output, tuple) else (output,))]
                case "call_module":
                    call = info_of(node).op
                    assert isinstance(call, Call)
                    operands = [used for used in node.args if isinstance(used, fx.Node)]
                    arguments = [self._used(path, node, used, values[used]) for used in operands]
                    results = self._call_layer(self._graphs[call.block], f"layers.{call.layer}.", call.layer, arguments)
                    values[node] = results[0] if len(results) == 1 else [list(r) for r in zip(*results, strict=True)]
                case _:
                    values[node] = self._attempt(path, node, values)
            self._note(path, node, values[node])
            for dead in graph.last_used_at.get(node, ()):
                del values[dead]
        raise AssertionError("a graph without an output")

    def _input(self, path: str, node: fx.Node, pending: Iterator[PerRank]) -> PerRank:
        info = info_of(node)
        if info.parameter is not None:
            return list(self.parameters[path + info.parameter])
        if isinstance(info.value, State):
            name = f"{path.removesuffix('update.')}{info.value.name}"
            if name not in self._states:
                raise StepError(path, node, KeyError(f"{name} is no state of the file's model"))
            return [self._states[name]] * len(self.ranks)
        if isinstance(info.value, Setting):
            return [*setting_values((info.value.name,), VERIFY_SETTINGS, training=self._training)] * len(self.ranks)
        if info.key == LAYER and info.value is None:
            return [torch.tensor(int(path.split(".")[1]), device="cpu")] * len(self.ranks)
        return next(pending)

    def _call_layer(self, graph: PreparedGraph, path: str, layer: int, arguments: Sequence[PerRank]) -> list[PerRank]:
        self._tell(layer, arguments)
        if not (self._recompute or graph.recompute == "layer") or self.steps is not None:
            return self._run(graph, path, arguments)
        flat = recomputed(lambda *operands: self._flat(graph, path, operands), *chain(*arguments))
        return [flat[start : start + len(self.ranks)] for start in range(0, len(flat), len(self.ranks))]

    def _tell(self, layer: int, arguments: Sequence[PerRank]) -> None:
        """Tells `watch` that the layer begins, and in backward that the gradient of its input is there."""
        if self._watch is None:
            return
        watch, ranks = self._watch, len(self.ranks)
        watch("forward", layer, ranks)
        given = next((value for value in arguments[0] if isinstance(value, Tensor) and value.requires_grad), None)
        if given is not None:
            given.register_hook(lambda _: watch("backward", layer, ranks))  # type: ignore[no-untyped-call]

    def _flat(self, graph: PreparedGraph, path: str, operands: Sequence[Tensor]) -> list[Any]:
        """A layer's results, flattened by rank, of arguments flattened by rank."""
        size = len(self.ranks)
        arguments = [list(operands[start : start + size]) for start in range(0, len(operands), size)]
        return [*chain(*self._run(graph, path, arguments))]

    def _attempt(self, path: str, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        try:
            given = {used: self._used(path, node, used, values[used]) for used in node.all_input_nodes}
            results = self._call(node, given)
            return results if self._routes is None else self._routes.replace(path, node, given, results)
        except FAILURES as error:
            raise StepError(path, node, error) from error

    def _call(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        if target_name(node) in SHUFFLES:
            return self._collective(node, values)
        assert callable(node.target)
        target, results = node.target, []
        for rank in self.ranks:
            args = [_of_rank(arg, values, rank) for arg in node.args]
            results.append(target(*args, **node.kwargs))
        return results

    def _used(self, path: str, node: fx.Node, used: fx.Node, values: PerRank) -> PerRank:
        """The values for one of several consumers; if steps are recorded, each consumer gets its own view."""
        if self.steps is None or len(used.users) < 2:
            return values
        views = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in values]
        for view in views:
            if isinstance(view, Tensor) and view.requires_grad:
                view.retain_grad()
        self.uses[path, info_of(node).key, info_of(used).key] = views
        return views

    def _note(self, path: str, node: fx.Node, values: PerRank) -> None:
        if self.steps is None:
            return
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                value.retain_grad()
        self.steps.append(RecordedNode(path, node, values))

    def _collective(self, node: fx.Node, values: Mapping[fx.Node, PerRank]) -> PerRank:
        operands = [values[arg] for arg in node.args if isinstance(arg, fx.Node)]
        group = next(arg for arg in node.args if isinstance(arg, str))
        shuffle, results = SHUFFLES[target_name(node)], [None for _ in self.ranks]
        for ranks in self._groups[group]:
            inputs = [[operand[rank] for rank in ranks] for operand in operands]
            for rank, result in zip(ranks, shuffle(node.args, inputs), strict=True):
                results[rank] = result
        return results


def _of_rank(arg: Any, values: Mapping[fx.Node, PerRank], rank: int) -> Any:
    if isinstance(arg, list | tuple):
        return [_of_rank(each, values, rank) for each in arg]
    return values[arg][rank] if isinstance(arg, fx.Node) else arg


def _sums(*terms: PerRank) -> PerRank:
    """The sum of several values on every rank."""
    return terms[0] if len(terms) == 1 else [sum(of_rank) for of_rank in zip(*terms, strict=True)]
