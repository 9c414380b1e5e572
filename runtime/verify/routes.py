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
from moec.passes.ir import REPLICATED, Layout, local_slices
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.mixture_values import choices_of


class Routes:
    """What the gates with scores choose in a run. `given` (module path → experts of every rank) replaces choices."""

    def __init__(self, given: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        self.experts: dict[str, list[Tensor]] = {}
        """The choices of this run: module path → int64 `[B, S, k]` of every rank; and `module path/value` → what an op
        decides (`Op.decides`), laid out as choices are."""
        self.scores: dict[str, list[Tensor]] = {}
        """The router logits of this run: module path → `[B, S, E]` of every rank."""
        self._given = given

    def replace(self, path: str, node: fx.Node, inputs: Mapping[fx.Node, list[Any]], results: list[Any]) -> list[Any]:
        """The results of a node on every rank, from its inputs and its computed results.

        Given choices replace the computed choices, and their weights the computed weights.
        """
        op, value = info_of(node).op, info_of(node).value
        if op is None or not (op.scores or op.decides):
            return results
        named = dict(zip(op.gives.split(), op.results, strict=True))
        if op.decides and value is named[op.decides]:
            return self._repeated(f"{path}/{op.results[0].name}", results)
        if not op.scores:
            return results
        scores = op.named(op.operands)[op.scores]
        for source, values in inputs.items():
            if info_of(source).key == scores:
                self.scores[path] = values
        if value is named["experts"]:
            return self._repeated(path, results)
        if value is named["weights"] and self._given is not None:
            pairs = zip(self.scores[path], self._given[path], strict=True)
            results = [WEIGHTS[type(op)](op, of_rank, experts) for of_rank, experts in pairs]
        return results

    def _repeated(self, key: str, results: list[Any]) -> list[Any]:
        """The given choices under `key`, or else these; records them."""
        self.experts[key] = found = results if self._given is None else list(self._given[key])
        return found


def shared_out(plan: Plan, experts: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Shards the global batch's choices (as `Routes.experts` has them, `[B, S, k]`) over the ranks."""
    dense = plan.meshes["dense"]
    layouts = layouts_of_choices(plan)
    layout_of = {key: layouts[key.partition("/")[0]] for key in experts}
    return {
        key: [whole[local_slices(whole.shape, layout_of[key], dense, rank)] for rank in range(plan.world_size)]
        for key, whole in experts.items()
    }


def layouts_of_choices(plan: Plan) -> dict[str, Layout]:
    """The layout of each layer's choices on the dense mesh, by the layer's path."""
    chosen = ((call.layer, choices_of(plan.program.block(call.block))) for call in layer_calls(plan.program))
    return {f"layers.{layer}.": (choices.layout or REPLICATED) for layer, choices in chosen if choices is not None}
