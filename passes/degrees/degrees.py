"""`Degrees`: the number of ranks that cut each part of a model, and the division of a step. All passes use one value.

`choose_degrees` computes it from the degrees that a file states. `moec check` runs nothing else of passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Spec
from moec.passes.degrees.degree_rules import problems_of
from moec.passes.degrees.near_rules import near_problems
from moec.passes.degrees.stated_degrees import (
    Mixtures,
    divisors,
    microbatches_of,
    mixtures_of,
    number_of,
    recomputed_of,
    stated_names,
    zero_of,
)

if TYPE_CHECKING:  # `moec check` imports no op of the IR
    from moec.passes.ir import Recompute


class ExpertDegrees(NamedTuple):
    """The expert degrees of some layers: one factorisation of the ranks, and so one mesh.

    `edp` is ranks / (`ep` * `etp`). `stated`: the file gives this `ep` for all of these layers.
    """

    layers: tuple[int, ...]
    ep: int
    edp: int
    etp: int = 1
    stated: bool = False


class Degrees(NamedTuple):
    """The degree of every axis, and every option that divides a step. Equal degrees give equal Programs.

    `experts` is in the order of the layers. `zero`: the stage, 0 to 3. `recompute`: the part of each layer that its
    backward pass computes again. `microbatches`: the parts of a rank's sequences of a step. `sequence_parallel`: each
    rank of a tp group has a piece of a sequence between layers. `stated`: the words among these that the file has.

    Not supported yet, and so at their defaults: `cp`, `pp`, `virtual` (stages of a rank), `schedule` (of a pipeline),
    `overlap` (parts of an exchange) and `exchange` (its algorithm).
    """

    ranks: int
    dp: int
    tp: int
    experts: tuple[ExpertDegrees, ...]
    zero: int
    recompute: tuple[Recompute, ...]
    microbatches: int
    sequence_parallel: bool
    cp: int = 1
    pp: int = 1
    virtual: int = 1
    schedule: str | None = None
    overlap: int = 1
    exchange: str = "linear"
    stated: frozenset[str] = frozenset()

    @property
    def ep_of(self) -> Mapping[int, int]:
        """`ep` of each layer with a mixture."""
        return {layer: experts.ep for experts in self.experts for layer in experts.layers}

    def with_ep(self, ep: int) -> Degrees:
        """These degrees with one `ep` for all layers with a mixture."""
        layers = tuple(sorted(layer for experts in self.experts for layer in experts.layers))
        return self._replace(experts=(ExpertDegrees(layers, ep, self.ranks // ep),) if layers else ())

    def recomputing(self, word: Recompute) -> Degrees:
        """These degrees, where each layer recomputes `word`, unless the file has a word for it.

        Layers without a mixture have no `experts` to recompute.
        """
        return self._replace(recompute=tuple(self._recompute_of(layer, word) for layer in range(len(self.recompute))))

    def _recompute_of(self, layer: int, word: Recompute) -> Recompute:
        if self._has_own(layer):
            return self.recompute[layer]
        if word == "experts" and layer not in self.ep_of:
            return "none"
        return word

    def changes_from(self, other: Degrees) -> dict[str, object]:
        """The words of `parallel`, with values, that turn `other` into these degrees.

        All layers have one `ep`, or the same as in `other`.
        """
        changes: dict[str, object] = {}
        if self.ep_of != other.ep_of:
            changes["ep"] = self.experts[0].ep
        if self.zero != other.zero:
            changes["zero"] = self.zero
        if self.recompute != other.recompute:
            words = (word for layer, word in enumerate(self.recompute) if word != "none" and not self._has_own(layer))
            changes["recompute"] = next(words, "none")
        if self.microbatches != other.microbatches:
            changes["microbatches"] = self.microbatches
        return changes

    def _has_own(self, layer: int) -> bool:
        return f"recompute.{layer}" in self.stated

    def require_near(self, spec: Spec) -> None:
        """Raises `DiagnosticError` unless gates `topology` find the experts that they ask for near each rank."""
        if problems := near_problems(spec, self.tp, self.ep_of):
            raise DiagnosticError(problems)


def choose_degrees(spec: Spec) -> Degrees:
    """The degrees of `spec`: what it states, and the defaults of the language for the rest.

    `ep` is the largest that divides the ranks and the experts of every layer without a stated one; `tp = 1`; `dp` is
    ranks / `tp`. Raises `DiagnosticError` with every rule that a stated degree breaks.
    """
    ranks, parallel = spec.cluster.ranks, spec.parallel
    mixtures = mixtures_of(spec)
    if problems := problems_of(spec, mixtures):
        raise DiagnosticError(problems)
    tp = number_of(parallel.tp) or 1
    degrees = Degrees(
        ranks=ranks,
        dp=number_of(parallel.dp) or ranks // tp,
        tp=tp,
        experts=_experts(ranks, mixtures),
        zero=zero_of(spec),
        recompute=tuple(recomputed_of(spec)),
        microbatches=microbatches_of(spec),
        sequence_parallel=parallel.sequence_parallel,
        stated=stated_names(spec),
    )
    degrees.require_near(spec)
    return degrees


def _experts(ranks: int, mixtures: Mixtures) -> tuple[ExpertDegrees, ...]:
    """One factorisation per distinct `ep`. Layers without a stated `ep` get the largest that fits all of them."""
    default = _largest_ep(ranks, [count for moe, stated, _ in mixtures if stated is None for count in moe.counts])
    layers: dict[int, list[int]] = {}
    by_default: set[int] = set()
    for _, stated, numbers in mixtures:
        ep = stated.ep if stated else default
        layers.setdefault(ep, []).extend(numbers)
        by_default |= set() if stated else {ep}
    degrees = (
        ExpertDegrees(layers=tuple(sorted(numbers)), ep=ep, edp=ranks // ep, stated=ep not in by_default)
        for ep, numbers in layers.items()
    )
    return tuple(sorted(degrees, key=lambda degree: degree.layers[0]))


def _largest_ep(ranks: int, expert_counts: list[int]) -> int:
    if not expert_counts:
        return 1
    return max(d for d in divisors(ranks) if all(count % d == 0 for count in expert_counts))
