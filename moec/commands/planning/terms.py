"""The seconds of a step in lines: what they go to, the largest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moec.grammar.amounts import count
from moec.grammar.spec import Spec
from moec.passes.cost.groups import group_along, parts_of_group
from moec.passes.cost.seconds import Seconds, Term
from moec.passes.ir import Program

SMALLEST = 0.005
"""The part of a step below which terms are put together."""

HEADINGS: Mapping[str, tuple[Term, ...]] = {
    "compute": ("experts", "products", "attention", "elementwise", "launches"),
    "computed again": ("again",),
    "all_to_all": ("all_to_all",),
    "gathered rows": ("etp",),
    "tensor parallel": ("tp",),
    "context parallel": ("cp",),
    "other sends": ("other_sends",),
    "uneven stages": ("uneven",),
    "bubble": ("bubble",),
    "parameters": ("casts", "weights", "gradients", "optimizer"),
}
"""The terms of each line."""

NAMES: Mapping[Term, str] = {
    "products": "other products",
    "elementwise": "element-wise",
    "launches": "the host's launches",
    "casts": "casts and additions",
    "weights": "gathers of weights",
    "gradients": "sums of gradients",
}
"""Terms in words, where their own name says less."""

AXES: Mapping[str, str] = {
    "all_to_all": "ep",
    "gathered rows": "etp",
    "tensor parallel": "tp",
    "context parallel": "cp",
}
"""The axis of each line of collectives of activations."""


def term_lines(step: Seconds, program: Program, spec: Spec) -> Iterator[str]:
    """`15.7  compute              experts 6.3, other products 4.6`, the largest first."""
    sums = by_heading(step)
    shown = [name for name in sums if abs(sums[name]) >= SMALLEST * step.total]
    for name in sorted(shown, key=lambda name: -sums[name]):
        yield f"{amount(sums[name], step.total):>8}  {name:<17} {detail(name, step, program, spec)}".rstrip()
    if rest := sum(sums[name] for name in sums if name not in shown):
        yield f"{amount(rest, step.total):>8}  others"


def by_heading(step: Seconds) -> dict[str, float]:
    """The seconds of each line."""
    return {name: sum(float(step.of.get(term, 0.0)) for term in terms) for name, terms in HEADINGS.items()}


def differences(step: Seconds, other: Seconds) -> dict[str, float]:
    """How much more each line of `other` takes than that of `step`, the largest difference first; they add up."""
    before, after = by_heading(step), by_heading(other)
    return dict(sorted(((name, after[name] - before[name]) for name in HEADINGS), key=lambda item: -abs(item[1])))


def difference_lines(step: Seconds, other: Seconds) -> Iterator[tuple[str, float, str]]:
    """Name, seconds and text of each difference that its digits show: `  + 1.1 s  bubble`."""
    for name, seconds in differences(step, other).items():
        if float(amount(abs(seconds), step.total)):
            yield name, seconds, f"  {signed(seconds, step.total):>9} s  {name}"


def signed(seconds: float, of: float) -> str:
    """`+ 1.1`, `- 0.4`, with digits as `amount` has them."""
    return f"{'-' if seconds < 0 else '+'} {amount(abs(seconds), of)}"


def amount(seconds: float, of: float) -> str:
    """Seconds with so many digits, seven at most, that the last one is at most a hundredth `of` all seconds."""
    digits = next((n for n in range(7) if of >= 100.0 * 10**-n), 7)
    return f"{seconds:.{digits}f}"


def detail(name: str, step: Seconds, program: Program, spec: Spec) -> str:
    """What a line is made of, or the group that it crosses."""
    terms = HEADINGS[name]
    if len(terms) > 1:
        parts = sorted(((float(step.of.get(term, 0.0)), term) for term in terms), reverse=True)
        shown = [(seconds, term) for seconds, term in parts if seconds >= SMALLEST * step.total]
        return ", ".join(f"{NAMES.get(term, term)} {amount(seconds, step.total)}" for seconds, term in shown)
    if name in AXES:
        return ", ".join(dict.fromkeys(_group_in_words(AXES[name], program, spec)))
    return ""


def _group_in_words(axis: str, program: Program, spec: Spec) -> Iterator[str]:
    """`64 ranks of ep over node, rail`, for each mesh with such groups."""
    for block in program.blocks:
        group = group_along(axis, program.meshes_of(block))
        if group.ranks > 1:
            parts = zip(spec.cluster.levels, parts_of_group(group, spec.cluster), strict=True)
            crossed = ", ".join(level.name for level, (_, units) in parts if units > 1)
            yield f"{count(group.ranks, 'rank')} of {axis} over {crossed}"
