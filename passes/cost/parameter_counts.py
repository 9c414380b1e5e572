"""Counts parameters: in total, of a token, of each layer, of a rank; and writes them as `46.7B-12.9B-8E-2K-0S`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from moec.grammar.spec import Dense, ExpertChoice, Mixture, Moe, Smear, Soft, Spec, Subject
from moec.passes.cost.totals import costs_of, runs_on
from moec.passes.ir import Program
from moec.passes.ir.work.workload import Workload


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of some parameters: all, those that one token uses, those that one rank holds.

    A token uses the whole embedding and output head, and of `n` experts the `k` that it goes to.
    """

    total: int = 0
    active: int = 0
    per_rank: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.total + other.total, self.active + other.active, self.per_rank + other.per_rank)

    def times(self, number: int) -> Elements:
        """The elements of so many equal layers."""
        return Elements(self.total * number, self.active * number, self.per_rank * number)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerElements:
    """Equal layers: their numbers, the elements of one of them, and its parts by name (`attention`, `moe.experts`)."""

    layers: tuple[int, ...]
    one_layer: Elements
    parts: dict[str, Elements]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """The parameters of a Program after all passes. `outside`: those of no layer, by part (`embedding`, `head`).

    In a pipeline `whole.per_rank` is that of the rank with the most.
    """

    whole: Elements
    layers: tuple[LayerElements, ...]
    outside: dict[str, Elements]
    notation: str


def count_parameters(program: Program, spec: Spec) -> ParameterCounts:
    """Counts the parameters of `program`, which was compiled from `spec`. States such as `online` biases are none."""
    costs, numbers = costs_of(program, Workload.of(spec, program).even), program.layers_by_block
    layers, outside, whole = [], dict[str, Elements](), Elements()
    for cost, times in runs_on(program, costs):
        name = cost.block.name
        parts: dict[str, Elements] = {}
        for p, *elements in cost.elements():
            part = _part(p.name)
            parts[part] = parts.get(part, Elements()) + Elements(*elements)
        own = sum(parts.values(), start=Elements())
        whole += own.times(times)
        if numbers[name]:
            layers.append(LayerElements(layers=tuple(numbers[name]), one_layer=own, parts=parts))
        else:
            outside |= parts
    ranks = (runs_on(program, costs, stages) for stages in program.stages_by_rank)
    most = max(sum(times * local for cost, times in runs for *_, local in cost.elements()) for runs in ranks)
    whole = replace(whole, per_rank=most)
    layers.sort(key=lambda layer: layer.layers)
    shown = "-".join((short(whole.total), short(whole.active), *shape_of(spec.subject)))
    return ParameterCounts(whole=whole, layers=tuple(layers), outside=outside, notation=shown)


def _part(name: str) -> str:
    """The part of a parameter: `attention` of `attention.q.weight`, `moe.experts` of `moe.experts.up.weight`."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "moe" and len(rest) > 1 else first


def short(number: float) -> str:
    """Three digits and a letter: `46.7B`."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale * 0.9995:
            return f"{number / scale:#.3g}".rstrip(".") + letter
    return f"{number:g}"


def shape_of(subject: Subject) -> tuple[str, str, str]:
    """Experts, experts of a token, and shared experts: `8E`, `2K`, `0S`. Where layers differ, `32/64E`."""
    mixtures = [moe for moe in subject.mixtures if moe is not None]
    experts = _listed(_experts(moe, subject) for moe in mixtures)
    chosen = _listed(_chosen(moe, subject) for moe in mixtures)
    return f"{experts}E", f"{chosen}K", f"{_listed(map(_shared, mixtures))}S"


def _listed(numbers: Iterable[float]) -> str:
    return "/".join(f"{number:g}" for number in dict.fromkeys(numbers)) or "0"


def _experts(moe: Moe, subject: Subject) -> int:
    """The number of feed-forwards to choose from, those of inner mixtures included."""
    within = [subject.within(part) for part in moe.parts]
    inner = [_experts(mixture, subject) if mixture else 1 for mixture in within]
    return sum(part.count * number for part, number in zip(moe.parts, inner, strict=True))


def _chosen(moe: Moe, subject: Subject) -> float:
    """The number of experts that a token uses: a mean for `expert_choice`, all for gates that mix all."""
    within = subject.within(moe.parts[0])
    return _choices(moe) * (_chosen(within, subject) if within else 1)


def _choices(moe: Moe) -> float:
    match moe.gate:
        case ExpertChoice(factor=factor):
            return float(factor)
        case Dense() | Soft() | Smear():
            return moe.num_experts
        case gate:
            return int(getattr(gate, "k", 1))


def _shared(moe: Moe) -> int:
    """The shared feed-forward as the number of experts that are together as wide, else as one; and the dense path."""
    body = moe.parts[0].body
    number = 0
    if moe.shared is not None:
        width, of_expert = (getattr(part, "hidden", None) for part in (moe.shared, body))
        alike = not isinstance(body, Mixture) and type(moe.shared) is type(body)
        number = width // of_expert if alike and width and of_expert and width % of_expert == 0 else 1
    return number + (moe.residual is not None)
