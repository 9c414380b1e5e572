"""What a search finds, for benchmarks: candidates with their estimates, and a published layout among all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moec.grammar import load_text
from moec.grammar.spec import Parallel, Spec
from moec.grammar.stated import OPEN_WORDS
from moec.passes.cost.rates import ClusterRates
from moec.passes.degrees.stated_degrees import divisors
from moec.passes.lower.lower_model import lower
from moec.passes.search.candidate import Candidate, candidate_of
from moec.passes.search.estimates import estimates
from moec.passes.search.fronts import rows_of
from moec.passes.search.ranking import rank, words_of
from moec.passes.search.rules import with_first_values
from moec.passes.search.space import Space
from moec.passes.search.tables import Table
from planning.rows import Published
from planning.score import AsRun

MEGATRON = ("one_f_one_b", "interleaved")
"""The schedules of Megatron-Core."""

PLACED = 4
"""The candidates of each `pp` and `tp` that are placed."""


def open_file(model: str, nodes: int, batch: int) -> Spec:
    """A model of the library on nodes of 8 H100, with every word open."""
    words = "; ".join(f"{word} = auto" for word in OPEN_WORDS)
    text = f"""use "models/{model}"
cluster "nodes" {{
  device = h100
  level "node" {{ size = 8; bandwidth = 450GB/s }}
  level "rail" {{ size = {nodes}; bandwidth = 50GB/s }}
}}
train {{ batch = {batch}; sequence = 4096; optimizer = adamw(lr = 1e-4) }}
parallel {{ {words} }}
"""
    return load_text(text, name="searched.moe").unwrap()


@dataclass(frozen=True, slots=True)
class Near:
    """A candidate's estimates over the predictions of its own plan."""

    words: dict[str, object]
    seconds: float
    memory: float


def near(spec: Spec, number: int, seed: int) -> Iterator[Near]:
    """Candidates drawn from all ZeRO stages and recomputations alike, of those whose memory is below four
    devices'."""
    draw, rates = random.Random(seed), ClusterRates(spec.cluster)
    space, lowered, found = Space(spec), lower(with_first_values(spec)), []
    for of in estimates(Table.of(space, lowered, rows_of(space, lowered, rates)), rates):
        fitting = np.flatnonzero(of.memory <= 4 * spec.cluster.device.memory)
        for row in draw.choices(fitting.tolist(), k=number) if len(fitting) else ():
            found.append((words_of(of, row), float(of.seconds[row]), float(of.memory[row])))
    for words, seconds, memory in draw.sample(found, min(number, len(found))):
        exact = candidate_of(spec.replace(parallel=spec.parallel.replace(**words))).prediction
        yield Near(words, seconds / float(exact.step.total), memory / float(exact.memory.peak.bytes.total))


def layouts(row: Published) -> list[Candidate]:
    """The plans in Megatron's space for the model, batch and cluster of a row, the fastest first.

    They have no context parallelism or recomputation, ZeRO 1, sequences one by one, and 1F1B or interleaved.
    """
    stated = load_text(row.text, name="published.moe").unwrap()
    ranks, found = stated.cluster.ranks, list[Candidate]()
    rates = AsRun(stated.cluster)
    for pp in divisors(ranks):
        for tp in divisors(ranks // pp):
            parts, left = divmod(row.batch * pp * tp, ranks)
            if left or not parts or pp > stated.model.depth:
                continue
            words = {"ep": "auto", "etp": "auto", "schedule": "auto"}
            spec = stated.replace(parallel=Parallel(pp=pp, tp=tp, zero=1, microbatches=parts, **words))
            if next(Space(spec).plans(), None) is not None:
                found += _placed(spec, rates)
    return sorted(found, key=lambda candidate: candidate.prediction.step.total)


def _placed(spec: Spec, rates: AsRun) -> Iterator[Candidate]:
    ranked = [each for each in rank(spec, rates).first if each.words["schedule"] in (None, *MEGATRON)]
    for each in ranked[:PLACED]:
        words = {word: value for word, value in each.words.items() if word != "dp"}
        candidate = candidate_of(spec.replace(parallel=spec.parallel.replace(**words)), words, rates)
        if candidate.prediction.fits:
            yield candidate


def place_of(row: Published, found: Sequence[Candidate]) -> tuple[int, float]:
    """The place of a row's degrees among plans, and its seconds over the best's; 0 if it is not among them."""
    published = load_text(row.text, name="published.moe").unwrap().parallel
    for place, candidate in enumerate(found, 1):
        words = candidate.spec.parallel
        if all(getattr(words, word) == getattr(published, word) for word in ("pp", "tp", "ep", "etp")):
            return place, candidate.prediction.step.total / found[0].prediction.step.total
    return 0, 0.0
