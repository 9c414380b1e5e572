"""Records the choices of experts of one run and repeats them in others.

Rounding moves router logits a little, and where two are almost equal another expert wins. Such a token's gradients
differ entirely, in a correct plan too, so runs in two dtypes are comparable only with the same choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from moec.codegen.emit import WEIGHTS, info_of
from moec.codegen.plan import Plan
from moec.passes.ir import REPLICATED, Layout, Op, Value, local_slices
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.mixture_values import choices_of


class Routes:
    """The choices of gates in a run. `replacements` (key of the choices → experts of every rank) replaces them.

    A layer may have two gates, of its experts and of its heads. The key of choices is their name in the module.
    """

    def __init__(self, replacements: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        self.experts: dict[str, list[Tensor]] = {}
        """The choices of this run: key, such as `layers.1.e`, → int64 `[B, S, k]` of every rank."""
        self.scores: dict[str, list[Tensor]] = {}
        """The router logits of this run: key of the choices → `[B, S, E]` of every rank."""
        self._replacements = replacements

    def replace(self, path: str, node: fx.Node, inputs: Mapping[fx.Node, list[Any]], results: list[Any]) -> list[Any]:
        """The results of a node on every rank, from its inputs and its computed results.

        Replacements replace the computed choices, and their weights the computed weights.
        """
        op, value = info_of(node).op, info_of(node).value
        if op is None:
            return results
        if value is not None and value in _chosen(op):
            key = f"{path}{value.name}"
            self.experts[key] = results if self._replacements is None else list(self._replacements[key])
            return self.experts[key]
        if not op.scores:
            return results
        scores, named = op.named(op.operands)[op.scores], dict(zip(op.gives.split(), op.results, strict=True))
        key = f"{path}{named['experts'].name}"
        for source, values in inputs.items():
            if info_of(source).key == scores:
                self.scores[key] = values
        if value is named.get("weights") and value is not None and self._replacements is not None:
            pairs = zip(self.scores[key], self._replacements[key], strict=True)
            results = [WEIGHTS[type(op)](op, logits, experts) for logits, experts in pairs]
        return results


def sharded_choices(plan: Plan, experts: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Shards the global batch's choices (key → `[B, S, k]`) over the ranks."""
    dense = plan.meshes["dense"]
    layouts = _layouts_of_results(plan)
    return {
        key: [choices[local_slices(choices.shape, layouts[key], dense, rank)] for rank in range(plan.stage_size)]
        for key, choices in experts.items()
    }


def layouts_of_choices(plan: Plan) -> dict[str, Layout]:
    """The layout of the choices of each layer's mixture on the dense mesh, by the layer's path."""
    choices = ((call.layer, choices_of(plan.program.block(call.block))) for call in layer_calls(plan.program))
    return {f"layers.{layer}.": (value.layout or REPLICATED) for layer, value in choices if value is not None}


def _chosen(op: Op) -> list[Value]:
    """The results of a gate that depend on an order of scores: its experts, and what `Op.chooses` names."""
    names = {*op.chooses.split(), *(["experts"] if op.scores else [])}
    return [value for value, name in zip(op.results, op.gives.split(), strict=True) if name in names] if names else []


def _layouts_of_results(plan: Plan) -> dict[str, Layout]:
    """The layouts of the values that gates choose, by key."""
    return {
        f"layers.{call.layer}.{value.name}": value.layout or REPLICATED
        for call in layer_calls(plan.program)
        for op in plan.program.block(call.block).ops
        for value in _chosen(op)
    }
