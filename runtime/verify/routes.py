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
from moec.passes.ir import REPLICATED, Layout, Op, local_slices
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.mixture_values import choices_of


class Routes:
    """What the gates with scores choose in a run. `given` (module path → experts of every rank) replaces choices."""

    def __init__(self, given: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        self.experts: dict[str, list[Tensor]] = {}
        """The choices of this run: module path → int64 `[B, S, k]` of every rank."""
        self.scores: dict[str, list[Tensor]] = {}
        """The router logits of this run: module path → `[B, S, E]` of every rank."""
        self._given = given

    def replace(self, path: str, node: fx.Node, inputs: Mapping[fx.Node, list[Any]], results: list[Any]) -> list[Any]:
        """The results of a node on every rank, from its inputs and its computed results.

        Given choices replace the computed choices, and their weights the computed weights.
        """
        op, value = info_of(node).op, info_of(node).value
        if op is None:
            return results
        if value is not None and (key := _key(path, op, value.name)) is not None:
            self.experts[key] = results if self._given is None else list(self._given[key])
            return self.experts[key]
        if not op.scores:
            return results
        scores = op.named(op.operands)[op.scores]
        for source, values in inputs.items():
            if info_of(source).key == scores:
                self.scores[path] = values
        named = dict(zip(op.gives.split(), op.results, strict=True))
        if value is named["experts"]:
            self.experts[path] = results = results if self._given is None else list(self._given[path])
        elif value is named.get("weights") and value is not None and self._given is not None:
            pairs = zip(self.scores[path], self._given[path], strict=True)
            results = [WEIGHTS[type(op)](op, of_rank, experts) for of_rank, experts in pairs]
        return results


def shared_out(plan: Plan, experts: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Shards the global batch's choices (module path → `[B, S, k]`) over the ranks."""
    dense = plan.meshes["dense"]
    layouts = layouts_of_choices(plan) | _layouts_of_others(plan)
    return {
        path: [whole[local_slices(whole.shape, layouts[path], dense, rank)] for rank in range(plan.world_size)]
        for path, whole in experts.items()
    }


def layouts_of_choices(plan: Plan) -> dict[str, Layout]:
    """The layout of each layer's choices on the dense mesh, by the layer's path."""
    chosen = ((call.layer, choices_of(plan.program.block(call.block))) for call in layer_calls(plan.program))
    return {f"layers.{layer}.": (choices.layout or REPLICATED) for layer, choices in chosen if choices is not None}


def _key(path: str, op: Op, value: str) -> str | None:
    """The key of a value that `Op.chooses` names, such as `layers.1.keep_first.kept`; None for other values."""
    names = dict(zip((v.name for v in op.results), op.gives.split(), strict=True)) if op.chooses else {}
    name = names.get(value)
    return f"{path}{op.mnemonic}.{name}" if name in op.chooses.split() else None


def _layouts_of_others(plan: Plan) -> dict[str, Layout]:
    """The layouts of the values that `Op.chooses` names, by key."""
    return {
        key: value.layout or REPLICATED
        for call in layer_calls(plan.program)
        for op in plan.program.block(call.block).ops
        for value in op.results
        if (key := _key(f"layers.{call.layer}.", op, value.name)) is not None
    }
