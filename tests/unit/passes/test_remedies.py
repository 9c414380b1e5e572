"""The change that a refusal proposes, against every combination of words, each compiled by itself."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache

import pytest
from support.plans import moe_text

from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Spec
from moec.passes.cost.memory import memory_of
from moec.passes.cost.step_time import step_seconds
from moec.passes.cost.totals import costs_of
from moec.passes.degrees.degrees import Degrees, choose_degrees
from moec.passes.ir import Program
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import compile_program
from moec.passes.remedies import Change, Placing, first_that_fits, has_room, what_could_help

Words = tuple[int | None, int, str, int]
"""`ep`, `zero`, `recompute`, `microbatches`."""

SKEWED = moe_text(ep=4, expert="swiglu(64)", batch=8, sequence=64, depth=2).replace(
    "sequence = 64", "sequence = 64; routing = zipf(2)"
)
FILES = {
    "a load so uneven that ep = 4 does not fit": (SKEWED, 4, "ep"),
    "weights that micro-batches of zero 1 keep": (
        moe_text(ranks=2, dim=64, expert="swiglu(128)", batch=8, dtype="bf16", zero=1, microbatches=4, depth=2),
        2, "microbatches",
    ),
}  # fmt: skip
LITTLE = 1.0005


@cache
def placed(spec: Spec, degrees: Degrees | None = None) -> Program:
    return compile_program(spec, "schedule", degrees).program


def first_change(spec: Spec, place: Placing = placed) -> Change | None:
    return first_that_fits(spec, choose_degrees(spec), place)


def peak_of(spec: Spec) -> float:
    return memory_of(placed(spec), spec).peak.bytes.total


def seconds_of(spec: Spec) -> float:
    program = placed(spec)
    workload = Workload.of(spec, program)
    part = replace(workload, batch=workload.batch // program.microbatches)
    return step_seconds(costs_of(program, part), program, spec).total


@cache
def peaks(text: str, ranks: int) -> dict[Words, float]:
    """The peak of every combination."""
    spec = load_text(text).unwrap()
    assert spec.train is not None
    sequences = spec.train.batch // ranks
    parts = [m for m in range(1, sequences + 1) if sequences % m == 0]
    degrees = [d for d in range(1, ranks + 1) if ranks % d == 0]
    words = itertools.product(degrees, range(4), ("none", "experts", "layer"), parts)
    return {each: peak_of(with_words(spec, each)) for each in words}


def with_words(spec: Spec, words: Words) -> Spec:
    ep, zero, recompute, microbatches = words
    changed = {"ep": ep, "zero": zero, "recompute": recompute, "microbatches": microbatches}
    return spec.replace(parallel=spec.parallel.replace(**changed))


def on_device(text: str, memory: float) -> Spec:
    spec = load_text(text).unwrap()
    return spec.replace(cluster=spec.cluster.replace(device=spec.cluster.device.replace(memory=memory)))


def stated(spec: Spec) -> Words:
    parallel = spec.parallel
    return parallel.ep, parallel.zero, parallel.recompute, parallel.microbatches or 1  # type: ignore[return-value]


def proposed(change: str, spec: Spec) -> Words:
    """The combination that a change gives, from the words as they are printed."""
    written = dict(re.findall(r"`(\w+) = (\w+)`", change))
    ep, zero, recompute, microbatches = stated(spec)
    return (
        int(written.get("ep", ep)), int(written.get("zero", zero)), written.get("recompute", recompute),
        int(written.get("microbatches", microbatches)),
    )  # fmt: skip


@pytest.mark.parametrize(("text", "ranks", "word"), FILES.values(), ids=FILES)
def test_the_only_combination_that_fits_is_found_though_another_word_than_the_files_is_in_it(
    text: str, ranks: int, word: str
) -> None:
    every = peaks(text, ranks)
    spec = on_device(text, LITTLE * min(every.values()))
    before = stated(spec)
    place = ("ep", "zero", "recompute", "microbatches").index(word)
    fitting = [words for words, peak in every.items() if peak <= spec.cluster.device.memory]
    assert all(words[place] < before[place] for words in fitting)  # less of a word that the file states
    found = first_change(spec, placed)
    assert found is not None
    assert proposed(found.text, spec) in fitting
    assert found.peak == pytest.approx(every[proposed(found.text, spec)])
    assert found.num_words == found.text.count("`") // 2


def test_of_all_that_fit_none_takes_five_per_cent_less_time() -> None:
    text, ranks, _ = FILES["weights that micro-batches of zero 1 keep"]
    every, spec = peaks(text, ranks), load_text(text).unwrap()
    seconds = {words: seconds_of(with_words(spec, words)) for words in every}
    ordered = sorted(every.values())
    for share in (0.1, 0.4, 0.7):
        spec = on_device(text, ordered[int(share * len(ordered))])
        found = first_change(spec, placed)
        assert found is not None
        memory = spec.cluster.device.memory
        with_room = [words for words, peak in every.items() if has_room(peak, memory)]
        least = min(seconds[words] for words in with_room or [w for w, peak in every.items() if peak <= memory])
        assert not with_room or has_room(found.peak, memory)
        assert seconds[proposed(found.text, spec)] < 1.06 * least


def of_mostly_weights(ranks: int) -> str:
    return moe_text(ranks=ranks, dim=64, expert="swiglu(128)", batch=8, zero=3, depth=2, recompute="layer")


def test_what_no_combination_fits_gets_the_fewest_ranks_that_fit_with_the_files_own_words() -> None:
    peak = {ranks: peak_of(load_text(of_mostly_weights(ranks)).unwrap()) for ranks in (4, 8)}
    memory = LITTLE * peak[8]
    assert memory < peak[4]
    found = first_change(on_device(of_mostly_weights(2), memory), placed)
    assert found == Change("use 8 ranks", 1, peak[8])


def of_whole_copies(ranks: int) -> str:
    """The same model; every rank has all parameters and states, unless a word of `parallel` says otherwise."""
    return moe_text(ranks=ranks, ep=1, dim=64, expert="swiglu(128)", batch=8, depth=2)


def least_peak(text: str) -> float:
    """The peak with words that save most."""
    spec = load_text(text).unwrap()
    return min(peak_of(with_words(spec, (min(8, spec.cluster.ranks), zero, "layer", 1))) for zero in (1, 3))


def test_where_neither_words_nor_ranks_fit_alone_both_are_proposed_with_the_fewest_ranks() -> None:
    memory = LITTLE * least_peak(of_whole_copies(4))
    assert memory < min(peaks(of_mostly_weights(2), 2).values())  # of every combination of words
    assert memory < min(peak_of(load_text(of_whole_copies(ranks)).unwrap()) for ranks in (4, 8))
    spec = on_device(of_whole_copies(2), memory)
    found = first_change(spec, placed)
    assert found is not None
    assert re.match("use 4 ranks and set `", found.text)
    assert found.num_words == 1 + found.text.count("`") // 2
    larger = load_text(of_whole_copies(4)).unwrap()
    assert found.peak == pytest.approx(peak_of(with_words(larger, proposed(found.text, spec))))
    assert found.peak <= memory


def test_a_smaller_batch_or_shorter_sequences_are_named_only_where_they_could_help() -> None:
    text = of_mostly_weights(2)
    spec = load_text(text).unwrap()
    states = memory_of(placed(spec), spec).moments[-1].bytes.of
    kept = sum(states.get(kind, 0.0) for kind in ("parameters", "gradients", "optimizer"))
    one_each = text.replace("batch = 8", "batch = 2")
    assert one_each != text
    memory = LITTLE * min(peaks(one_each, 2).values())
    assert memory < min(peaks(text, 2).values())

    def helps(memory: float) -> list[str]:
        named = what_could_help(little := on_device(text, memory), choose_degrees(little), placed)
        return [each for each in named if "ranks" not in each]

    assert helps(0.999 * kept) == []
    assert helps(LITTLE * kept) == ["shorter sequences"]
    assert helps(memory) == ["a smaller batch", "shorter sequences"]
    text = text.replace("parallel {", "parallel { microbatches = 4;")  # one sequence a rank is not cut into four
    assert "microbatches" in text
    assert helps(memory) == ["a smaller batch", "shorter sequences"]


def test_more_ranks_over_which_the_batch_does_not_divide_are_named_with_a_batch_that_does() -> None:
    text = of_whole_copies(8)
    spec = on_device(text, LITTLE * least_peak(of_whole_copies(16).replace("batch = 8", "batch = 16")))
    assert first_change(spec, placed) is None
    assert what_could_help(spec, choose_degrees(spec), placed)[0] == "16 ranks with `batch = 16`"


def test_what_more_ranks_do_not_fit_either_gets_nothing() -> None:
    """The batch does not divide over 16 ranks."""
    for memory in (0.9 * least_peak(of_mostly_weights(8)), 1000):
        assert first_change(on_device(of_mostly_weights(2), memory), placed) is None


def test_each_ep_and_zero_is_compiled_once_and_the_answer_once_more() -> None:
    text, ranks, _ = FILES["a load so uneven that ep = 4 does not fit"]
    calls = []

    def counted(spec: Spec, degrees: Degrees) -> Program:
        calls.append(degrees)
        return placed(spec, degrees)

    assert first_change(on_device(text, LITTLE * min(peaks(text, ranks).values())), counted)
    assert len(calls) == 3 * 4 + 1


def test_a_combination_that_another_rule_forbids_is_passed_over() -> None:
    text, ranks, _ = FILES["weights that micro-batches of zero 1 keep"]

    def only_zero_one(spec: Spec, degrees: Degrees) -> Program:
        if degrees.zero != 1:
            raise DiagnosticError([])
        return placed(spec, degrees)

    memory = LITTLE * min(peak for words, peak in peaks(text, ranks).items() if words[1] == 1)
    found = first_change(on_device(text, memory), only_zero_one)
    assert found is not None
    assert "zero" not in found.text
