"""Lowers a balance term over the tokens of all layers: the outputs of layers, and their sum in `forward`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moec.grammar.spec import Moe
from moec.passes.ir import Output
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.lower_balance import Routed, counted_by


def given_to_model(b: Builder, moe: Moe, routed: Routed) -> list[Output]:
    """The probabilities and choices of a layer's tokens, for a term over all layers; nothing without."""
    if (term := moe.pooled) is None:
        return []
    assert routed.gated.p is not None, "the language refuses a term over what the gate does not give"
    return [Output(routed.gated.p, "probabilities"), Output(counted_by(b, term, routed), "counted")]


@dataclass(slots=True)
class Pooled:
    """The term `E · Σ fᵢ·Pᵢ` with f and P over the tokens of the layers that were added.

    Over L layers `Σᵢ fᵢ·Pᵢ` with P the mean over layers is `1 / L · Σᵢ fᵢ·Σₗ Pₗᵢ`: the switch loss of the sums over
    layers of each token's probabilities and of the counts of choices, divided by L. One sum of probabilities is kept at
    a time, not those of every layer.
    """

    b: Builder
    layers: list[Moe] = field(default_factory=list)
    p: str = ""
    choices: str = ""

    def add(self, moe: Moe | None, outputs: Sequence[Output]) -> None:
        """Adds the outputs of a layer's call."""
        if moe is None or (term := moe.pooled) is None:
            return
        names = {output.role: output.name for output in outputs}
        p, span = names["probabilities"], term.span()
        choices = self.b.one(
            o.CountChoices, names["counted"], to="choices", span=span, num_experts=moe.num_experts, group=moe.group
        )
        if self.layers:
            p = self.b.one(o.Add, self.p, p, to="pooled", span=span)
            choices = self.b.one(o.Add, self.choices, choices, to="pooled_choices", span=span)
        self.p, self.choices = p, choices
        self.layers.append(moe)

    def balance(self, real: str | None) -> list[Output]:
        """The weighted term, a sum over tokens; `real` names the marks of real tokens in a model with padding."""
        if not self.layers:
            return []
        term, group = self.layers[0].pooled, self.layers[0].group
        assert term is not None
        marks, span = {"real": real} if real else {}, term.span()
        loss = self.b.one(o.SwitchLoss, self.p, self.choices, optional=marks, to="switch_loss", span=span, group=group)
        weights = (term.weight / len(self.layers),)
        weighted = self.b.one(o.WeightedSum, loss, to="pooled_balance", span=term.span(), weights=weights)
        return [Output(weighted, "balance")]
