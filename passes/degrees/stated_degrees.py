"""The degrees that a Spec states, and their layers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from moec.grammar.spec import Moe, Parallel, Spec
from moec.grammar.stated import Stated, data_parallel_size, number_of, pipeline_of, stated_by_layer
from moec.passes.degrees.schedules import Pipeline, takes

if TYPE_CHECKING:  # `moec check` imports no op of the IR
    from moec.passes.ir import Recompute


WORDS = ("dp", "tp", "cp", "pp", "ep", "etp", "zero", "recompute", "microbatches", "sequence_parallel")
"""The words of `parallel` that are degrees."""


def zero_of(spec: Spec) -> int:
    """The stage of ZeRO that the file states, 0 to 3; `auto` was rejected earlier."""
    assert isinstance(spec.parallel.zero, int)
    return spec.parallel.zero


def stated_names(spec: Spec) -> frozenset[str]:
    """The words of `parallel` that the file has; `layers.ep` and `recompute.3` are those of a block of `layers`."""
    parallel, defaults, all_layers = spec.parallel, Parallel(), range(spec.subject.depth)
    names = {name for name in WORDS if parallel.given(name) or getattr(parallel, name) != getattr(defaults, name)}
    names |= {
        f"layers.{word}" for block in parallel.layers for word in ("ep", "etp") if getattr(block, word) is not None
    }
    blocks = [block for block in parallel.layers if block.recompute is not None]
    return frozenset(names | {f"recompute.{number}" for block in blocks for number in block.layers or all_layers})


def microbatches_of(spec: Spec) -> int:
    """The number of micro-batches of a step, of a file that breaks no rule."""
    return fitting_microbatches(spec, spec.train.batch // data_parallel_size(spec) if spec.train else None) or 1


def fitting_microbatches(spec: Spec, sequences: int | None) -> int | None:
    """The number of micro-batches, if the schedule takes it and it divides a rank's `sequences` (None: any number).

    Else for a stated one the next smaller that does, or the next larger; by default the smallest from `pp` on. None
    where no number does.
    """
    pp, stated = pipeline_of(spec).pp, number_of(spec.parallel.microbatches)
    wanted = stated or pp

    def fits(number: int) -> bool:
        return (sequences is None or sequences % number == 0) and takes_microbatches(spec, number)

    if fits(wanted):
        return wanted
    numbers = range(1, max(wanted, 2 * pp) + 1) if sequences is None else divisors(sequences)
    below = (number for number in reversed(numbers) if stated and number < stated)
    above = (number for number in numbers if number > wanted)
    return next(filter(fits, itertools.chain(below, above)), None)


def takes_microbatches(spec: Spec, number: int) -> bool:
    """Whether the schedule of the pipeline takes this number of micro-batches."""
    pp, virtual, schedule = pipeline_of(spec)
    return pp == 1 or takes(schedule, Pipeline(pp, virtual, number))


def recomputed_of(spec: Spec) -> tuple[Recompute, ...]:
    """The part of each layer that backward computes again: `experts` of the layers with a mixture, else nothing."""
    words = stated_by_layer(spec, "recompute")
    return tuple(
        "none" if moe is None and words[number].value == "experts" else words[number].value
        for number, moe in enumerate(spec.subject.mixtures)
    )


class PlacedMixture(NamedTuple):
    """A mixture, the `ep` and the `etp` that the file states for it, and the layers with all three."""

    moe: Moe
    ep: Stated | None
    etp: Stated | None
    layers: list[int]


def mixtures_of(spec: Spec) -> list[PlacedMixture]:
    """Each distinct mixture with each `ep` and `etp` stated for it, in the order of the layers."""
    ep_of, etp_of = stated_by_layer(spec, "ep"), stated_by_layer(spec, "etp")
    placed: dict[tuple[int, int, int], PlacedMixture] = {}
    for number, moe in enumerate(spec.subject.mixtures):
        if moe is not None:
            ep, etp = ep_of.get(number), etp_of.get(number)
            placed.setdefault((id(moe), id(ep), id(etp)), PlacedMixture(moe, ep, etp, [])).layers.append(number)
    return list(placed.values())


def divisors(n: int) -> list[int]:
    """All divisors of `n`, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
