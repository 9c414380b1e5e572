"""Checks `ep` and `etp` against ranks, experts and their widths; each diagnostic names both places in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from moec.grammar.checking.mixture_rules import mixture
from moec.grammar.diagnostics import Diagnostic, diagnose
from moec.grammar.layer_numbers import numbered
from moec.grammar.spec import Activated, Experts, Moe, Spec
from moec.grammar.stated import Stated, stage_ranks, stated_of_layers
from moec.passes.degrees.expert_slices import sliced_experts
from moec.passes.degrees.fitting_expert_degrees import FittingExpertDegrees, fits_alone, nearest_divisor
from moec.passes.degrees.labels import labelled, not_whole
from moec.passes.degrees.stated_degrees import PlacedMixture


def expert_problems(spec: Spec, mixtures: list[PlacedMixture], fitting: FittingExpertDegrees) -> list[Diagnostic]:
    """A diagnostic for every rule that a stated `ep` or `etp` breaks; `fitting` has values that break none."""
    return [
        *_rank_problems(spec, "ep", fitting),
        *_rank_problems(spec, "etp", fitting),
        *_product_problems(spec, mixtures, fitting),
        *_count_problems(spec, mixtures, fitting),
        *_width_problems(spec, mixtures, fitting),
    ]


def _rank_problems(spec: Spec, word: Literal["ep", "etp"], fitting: FittingExpertDegrees) -> Iterator[Diagnostic]:
    """Degrees that do not divide the ranks, also of layers without a mixture."""
    for _, stated in stated_of_layers(spec, word):
        if stage_ranks(spec) % stated.value:
            degree = getattr(fitting, word).get(stated) or nearest_divisor(stage_ranks(spec), stated)
            yield not_whole(spec, stated.span, stated.value, f"set `{word} = {degree}`")


def _product_problems(spec: Spec, mixtures: list[PlacedMixture], fitting: FittingExpertDegrees) -> Iterator[Diagnostic]:
    """Degrees of one layer that divide all that they must, and whose product does not divide the ranks."""
    for ep, etp in dict.fromkeys((m.ep, m.etp) for m in mixtures):
        if ep is None or etp is None or stage_ranks(spec) % (ep.value * etp.value) == 0:
            continue
        if fits_alone(spec, mixtures, "ep", ep) and fits_alone(spec, mixtures, "etp", etp):
            label = labelled(etp.span, f"etp = {etp.value}")
            yield not_whole(spec, ep.span, ep.value, f"set `ep = {fitting.ep[ep]}`", etp.value, label)


def _count_problems(spec: Spec, mixtures: list[PlacedMixture], fitting: FittingExpertDegrees) -> list[Diagnostic]:
    """A diagnostic for each mixture, or part of one, whose experts its `ep` does not divide."""
    problems: list[Diagnostic] = []
    for moe, stated, _, layers in mixtures:
        if stated is None:
            continue
        count, ep = moe.num_experts, stated.value
        if count % ep == 0:
            problems += _part_problems(moe, stated, fitting.ep[stated])
            continue
        help = f"set `ep = {fitting.ep[stated]}` ({count // fitting.ep[stated]} per rank)"
        if larger_count := _more_experts(spec, mixtures, moe):
            help += f" or `experts = {larger_count} * …` ({larger_count // ep} per rank)"
        label = f"{count} experts declared here ({numbered(layers)})"
        message = f"{count} / {ep} leaves {count % ep} experts over"
        labels = labelled(moe.span("experts"), label)
        problems.append(diagnose("MOE0311", stated.span, message, labels=labels, help=help))
    return problems


def _more_experts(spec: Spec, mixtures: list[PlacedMixture], moe: Moe) -> int | None:
    """The next number of experts that every `ep` stated for `moe` divides, if ranks and the other rules allow it."""
    stated = [m for m in mixtures if m.moe is moe and m.ep is not None]
    larger_count = _next_multiple(moe.num_experts, [m.ep for m in stated])
    if not _divide_ranks(spec, stated) or not isinstance(moe.experts, Experts):
        return None
    larger = moe.replace(experts=moe.experts.replace(count=larger_count))
    broken_rules = {problem.code for problem in mixture(moe)}
    return None if {problem.code for problem in mixture(larger)} - broken_rules else larger_count


def _part_problems(moe: Moe, stated: Stated, fitting: int) -> Iterator[Diagnostic]:
    """A diagnostic for each part of the experts that `ep` does not divide: all ranks have equally many of each part."""
    for part in moe.parts:
        if part.count % stated.value:
            yield diagnose(
                "MOE0355",
                stated.span,
                f"{part.count} / {stated.value} leaves {part.count % stated.value} experts over",
                labels=labelled(part.span(), f"{part.count} experts of this kind"),
                help=f"set `ep = {fitting}`, or give other numbers of experts",
            )


def _width_problems(spec: Spec, mixtures: list[PlacedMixture], fitting: FittingExpertDegrees) -> Iterator[Diagnostic]:
    """A diagnostic for each declaration of experts and each `etp` that does not divide their hidden width."""
    broken: dict[Stated, dict[int, Activated]] = {}
    for moe, _, etp, _ in mixtures:
        if etp is not None:
            wrong = (body for body in sliced_experts(spec, moe) if body.hidden % etp.value)
            broken.setdefault(etp, {}).update((id(body), body) for body in wrong)
    for etp, bodies in broken.items():
        for body in bodies.values():
            wider = _wider(spec, mixtures, body) if len(bodies) == 1 else 0
            yield diagnose(
                "MOE0318",
                etp.span,
                f"{body.hidden} / {etp.value} is not whole",
                labels=labelled(body.span("hidden") or body.span(), f"each expert is {body.hidden} wide"),
                help=f"set `etp = {fitting.etp[etp]}`" + (f" or `hidden = {wider}`" if wider else ""),
            )


def _wider(spec: Spec, mixtures: list[PlacedMixture], body: Activated) -> int:
    """The next hidden width that every `etp` stated for these experts divides; 0 if they do not divide the ranks."""
    stated = [m for m in mixtures if m.etp is not None and any(b is body for b in sliced_experts(spec, m.moe))]
    wider = _next_multiple(body.hidden, [m.etp for m in stated])
    return wider if _divide_ranks(spec, stated) else 0


def _next_multiple(size: int, degrees: list[Stated | None]) -> int:
    multiple = math.lcm(*(stated.value for stated in degrees if stated is not None))
    return -(-size // multiple) * multiple


def _divide_ranks(spec: Spec, mixtures: list[PlacedMixture]) -> bool:
    """Whether the product of the degrees of each mixture divides the ranks."""
    products = (math.prod(stated.value for stated in (m.ep, m.etp) if stated is not None) for m in mixtures)
    return all(stage_ranks(spec) % product == 0 for product in products)
