"""`Degrees`: the number of ranks that cut each part of a model, and the division of a step. All passes use one value.

`choose_degrees` computes it from the degrees that a file states. `moec check` runs nothing else of passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Spec
from moec.grammar.stated import data_parallel_size, pipeline_of, sharing_degrees, stage_ranks
from moec.passes.degrees.degree_rules import problems_of
from moec.passes.degrees.guest_slots import guest_slots, require_slots
from moec.passes.degrees.near_rules import near_problems
from moec.passes.degrees.stated_degrees import (
    PlacedMixture,
    microbatches_of,
    mixtures_of,
    recomputed_of,
    stated_names,
    zero_of,
)

if TYPE_CHECKING:  # `moec check` imports no op of the IR
    from moec.passes.ir import Recompute


class ExpertDegrees(NamedTuple):
    """The expert degrees of some layers: one factorisation of the ranks, and so one mesh.

    `edp` is ranks / (`ep` * `etp`). `stated`: the file gives this `ep` for all of these layers. `guests`: the slots of
    a rank for weights of other ranks' experts; None where experts have no slots, and stay where they are.
    """

    layers: tuple[int, ...]
    ep: int
    etp: int
    edp: int
    stated: bool = False
    guests: int | None = None


class Degrees(NamedTuple):
    """The degree of every axis, and every option that divides a step. Equal degrees give equal Programs.

    `experts` is in the order of the layers. `zero`: the stage, 0 to 3. `recompute`: the part of each layer that its
    backward pass computes again. `microbatches`: the parts of a rank's sequences of a step. `sequence_parallel`: each
    rank of a tp group has a piece of a sequence between layers. `stated`: the words among these that the file has.

    `ranks` are those of one pipeline stage, and the other degrees factor them. `pp` is the number of ranks of a
    pipeline, each with `virtual` stages, `last_layers` the last layer of each stage
    (empty: `partition` chooses).

    Not supported yet, and so at their defaults: `overlap` (parts of an exchange) and `exchange` (its algorithm).
    """

    ranks: int
    dp: int
    cp: int
    tp: int
    experts: tuple[ExpertDegrees, ...]
    zero: int
    recompute: tuple[Recompute, ...]
    microbatches: int
    sequence_parallel: bool
    pp: int = 1
    virtual: int = 1
    schedule: str | None = None
    last_layers: tuple[int, ...] = ()
    overlap: int = 1
    exchange: str = "linear"
    stated: frozenset[str] = frozenset()

    @property
    def all_ranks(self) -> int:
        """The ranks of all pipeline stages together."""
        return self.ranks * self.pp

    @property
    def sharers(self) -> int:
        """Number of ranks that share a sequence."""
        return self.cp * self.tp

    @property
    def ep_of(self) -> Mapping[int, int]:
        """`ep` of each layer with a mixture."""
        return {layer: experts.ep for experts in self.experts for layer in experts.layers}

    @property
    def etp_of(self) -> Mapping[int, int]:
        """`etp` of each layer with a mixture."""
        return {layer: experts.etp for experts in self.experts for layer in experts.layers}

    def with_ep(self, ep: int) -> Degrees:
        """These degrees with one `ep` for all layers with a mixture, each with its own `etp`."""
        layers_of: dict[int, list[int]] = {}
        for experts in self.experts:
            layers_of.setdefault(experts.etp, []).extend(experts.layers)
        placed = (
            ExpertDegrees(tuple(sorted(layers)), ep, etp, self.ranks // (ep * etp)) for etp, layers in layers_of.items()
        )
        return self._replace(experts=tuple(sorted(placed, key=lambda experts: experts.layers)))

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
        if problems := near_problems(spec, self):
            raise DiagnosticError(problems)


def choose_degrees(spec: Spec) -> Degrees:
    """The degrees of `spec`: what it states, and the defaults of the language for the rest.

    `ep` is the largest with which `ep` * `etp` divides the ranks, and `ep` the experts, of every layer without a stated
    one; `pp = 1`, `tp = 1`, `cp = 1`, `etp = 1`; `dp` is ranks / (`cp` * `tp`). These ranks are those of one pipeline
    stage. Raises `DiagnosticError` with every rule that a stated degree breaks.
    """
    ranks, sharing, pipeline = stage_ranks(spec), sharing_degrees(spec), pipeline_of(spec)
    mixtures = mixtures_of(spec)
    if problems := problems_of(spec, mixtures):
        raise DiagnosticError(problems)
    degrees = Degrees(
        ranks=ranks,
        dp=data_parallel_size(spec),
        cp=sharing.cp,
        tp=sharing.tp,
        experts=tuple(experts._replace(guests=guest_slots(spec, experts.ep)) for experts in _experts(ranks, mixtures)),
        zero=zero_of(spec),
        recompute=recomputed_of(spec),
        microbatches=microbatches_of(spec),
        sequence_parallel=spec.parallel.sequence_parallel,
        pp=pipeline.pp,
        virtual=pipeline.virtual,
        schedule=pipeline.schedule if pipeline.pp > 1 else None,
        last_layers=tuple(stage.last for stage in spec.parallel.stages or ()),
        stated=stated_names(spec),
    )
    degrees.require_near(spec)
    require_slots(spec, degrees)
    return degrees


def _experts(ranks: int, mixtures: list[PlacedMixture]) -> tuple[ExpertDegrees, ...]:
    """One factorisation per distinct pair of `ep` and `etp`. Layers without a stated `ep` get the largest that fits all
    of them."""
    default = _largest_ep(ranks, [mixture for mixture in mixtures if mixture.ep is None])
    layers: dict[tuple[int, int], list[int]] = {}
    by_default: set[tuple[int, int]] = set()
    for mixture in mixtures:
        pair = mixture.ep.value if mixture.ep else default, mixture.etp.value if mixture.etp else 1
        layers.setdefault(pair, []).extend(mixture.layers)
        by_default |= set() if mixture.ep else {pair}
    degrees = (
        ExpertDegrees(tuple(sorted(numbers)), ep, etp, ranks // (ep * etp), stated=(ep, etp) not in by_default)
        for (ep, etp), numbers in layers.items()
    )
    return tuple(sorted(degrees, key=lambda degree: degree.layers[0]))


def _largest_ep(ranks: int, mixtures: list[PlacedMixture]) -> int:
    if not mixtures:
        return 1
    per_slice = (ranks // (mixture.etp.value if mixture.etp else 1) for mixture in mixtures)
    return math.gcd(*per_slice, *(count for mixture in mixtures for count in mixture.moe.counts))
