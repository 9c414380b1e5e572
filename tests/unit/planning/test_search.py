"""A search of open words: every plan that keeps the rules is a candidate, and the fastest that fits is chosen."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
from planning.searched import near, open_file
from support.plans import FOUR, moe_text
from support.tables import each_row

from moec.driver import to_spec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Parallel, Spec
from moec.grammar.spec.parallel import ParallelLayers
from moec.open_words import allows
from moec.passes.cost.prediction import Prediction, predict
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.pipeline import compile_program
from moec.passes.search.choose import choose
from moec.passes.search.space import Space

EXAMPLE = Path(__file__).parents[3] / "examples" / "open.moe"
WORDS = ("pp", "cp", "tp", "ep", "etp", "microbatches")


def open_spec(text: str, **words: object) -> Spec:
    """The file with these words of `parallel`, and no other."""
    return to_spec(text).replace(parallel=Parallel(**words))


def keeps_rules(spec: Spec) -> bool:
    try:
        choose_degrees(spec)
    except DiagnosticError:
        return False
    return True


def predicted(spec: Spec) -> Prediction:
    return predict(compile_program(spec, "schedule").program, spec)


def test_candidates_are_the_plans_that_keep_the_rules() -> None:
    """Six ranks of a model whose kv heads, widths and experts divide differently."""
    schedule, microbatches = "zero_bubble", (2,)
    text = moe_text(ranks=6, experts=6, expert="swiglu(12)", ffn="gelu(24)", batch=12, sequence=12, dim=24)
    spec = open_spec(text, **dict.fromkeys(WORDS, "auto") | {"microbatches": microbatches}, schedule=schedule)
    found = {(*sizes[:3], *sizes.experts[0], sizes.microbatches) for sizes, _ in Space(spec).plans()}
    divisors = (1, 2, 3, 6)
    every = itertools.product((1, 2, 3), divisors, divisors, divisors, divisors, microbatches)
    right = {
        sizes
        for sizes in every
        if keeps_rules(open_spec(text, **dict(zip(WORDS, sizes, strict=True)), schedule=schedule))
    }
    assert found == right
    assert len(right) > 20


def test_the_chosen_plan_is_the_fastest_of_all() -> None:
    text = moe_text(levels=FOUR, batch=16, memory="1GB")
    values = {"pp": (1, 2), "tp": (1, 2), "ep": (1, 2), "zero": (0, 1, 2, 3), "microbatches": (2,)}
    every = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    steps = [predicted(spec).step.total for words in every if keeps_rules(spec := open_spec(text, **words))]
    choice = choose(open_spec(text, **values | {"zero": "auto"}))
    assert choice.chosen.prediction.step.total <= min(steps) * (1 + 1e-9)
    assert choice.chosen.prediction.fits
    assert predicted(choice.chosen.spec).step == choice.chosen.prediction.step
    assert choose(open_spec(text, **values | {"zero": "auto"})) == choice


KINDS = """model "kinds" {
  vocab = 64; dim = 32; depth = 3; dtype = fp32
  layers 0 { attention = mha(heads = 2); moe { experts = 2 * gelu(256); gate = topk(1); balance = [] } }
  layers 1..2 { attention = mha(heads = 2); moe { experts = 8 * gelu(64); gate = topk(4); balance = [] } }
}
device "small" { kind = cpu; memory = 1GB; bandwidth = 20GB/s; peak { fp32 = 1TFLOPS } }
cluster "eight" { device = small; level "node" { size = 2; bandwidth = 4GB/s }; level "rail" { size = 4 } }
train { batch = 16; sequence = 64; optimizer = adamw(lr = 1e-3) }
"""
"""Few wide experts in one layer, many narrow ones in two."""


@each_row(
    ("stated", "own"),
    [
        ({"ep": "auto", "etp": (1, 2)}, {}),
        ({"ep": 2, "zero": (0, 3), "tp": 2}, {"ep": (1, 4, 5)}),
        ({"ep": 2, "tp": 2}, {"ep": "auto", "etp": 2}),
    ],
)
def test_each_kind_of_mixtures_has_the_degrees_that_are_best_for_it(
    stated: dict[str, object], own: dict[str, object]
) -> None:
    """The words of the block are for layers 1 and 2."""
    blocks = (ParallelLayers(layers=(1, 2), **own),) if own else ()
    file, degrees, found = to_spec(KINDS).replace(parallel=Parallel(**stated, layers=blocks)), (1, 2, 4, 8), []
    zeros = stated.get("zero", (0,))
    for ep, etp, own_ep, own_etp, zero in itertools.product(degrees, degrees, degrees, degrees, zeros):
        block = ParallelLayers(layers=(1, 2), ep=own_ep, etp=own_etp)
        spec = file.replace(parallel=Parallel(ep=ep, etp=etp, zero=zero, tp=stated.get("tp"), layers=(block,)))
        free = {"ep": (ep, own_ep), "etp": (etp, own_etp)}
        if keeps_rules(spec) and all(_is_allowed(*pair, stated.get(w), own.get(w)) for w, pair in free.items()):
            found.append(predicted(spec).step.total)
    choice = choose(file)
    assert len(found) > 2
    assert choice.chosen.prediction.step.total == pytest.approx(min(found), rel=1e-9)
    assert [of.layers for of in choose_degrees(choice.chosen.spec).experts] == [(0,), (1, 2)]
    assert allows(file, choice.chosen.spec)


def _is_allowed(value: int, own_value: int, stated: Any, own: Any) -> bool:
    own = stated if own is None else own
    pairs = ((value, stated), (own_value, own))
    return all(of == "auto" or (v in of if isinstance(of, tuple) else v == (of or 1)) for v, of in pairs)


def test_what_does_not_fit_is_not_chosen() -> None:
    words = {"tp": "auto", "ep": "auto", "recompute": "auto", "zero": "auto", "microbatches": "auto"}
    fastest = choose(open_spec(moe_text(memory="1GB"), **words))
    peak = int(fastest.chosen.prediction.memory.peak.bytes.total)
    smaller = choose(open_spec(moe_text(memory=f"{peak - 1000}B"), **words))
    assert smaller.chosen.prediction.fits
    assert smaller.chosen.words != fastest.chosen.words
    assert smaller.fitting < fastest.fitting
    none = choose(open_spec(moe_text(memory="1KB"), **words))
    assert (none.fitting, none.chosen.prediction.fits) == (0, False)


def test_near_the_limit_of_memory_the_fastest_plan_is_found_all_the_same() -> None:
    """5.7 s and 79.4 of 80 GB, estimated to be more; the fastest that is estimated to fit takes 14.6 s."""
    text = (
        EXAMPLE.read_text()
        .replace("2048", "4096", 1)
        .replace("swiglu(1408)", "swiglu(4096)")
        .replace("topk(6)", "topk(2)")
    )
    words = {"pp": (1, 2, 4), "ep": (2, 4), "zero": "auto", "microbatches": (16, 32), "schedule": "zero_bubble"}
    choice = choose(open_spec(text, **words))
    assert choice.chosen.words == {"pp": 4, "ep": 4, "zero": 3, "microbatches": 32}
    assert choice.chosen.prediction.fits


@each_row("pp", [1, 2])
def test_between_two_words_of_recompute_some_layers_have_each(pp: int) -> None:
    text = moe_text(levels=FOUR, depth=6, batch=16, sequence=64)
    peaks, steps = [], []
    for word in ("none", "layer"):
        found = predicted(open_spec(text, pp=pp, recompute=word, microbatches=4))
        peaks.append(found.memory.peak.bytes.total)
        steps.append(found.step.total)
    between = moe_text(levels=FOUR, depth=6, batch=16, sequence=64, memory=f"{int(sum(peaks) / 2)}B")
    choice = choose(open_spec(between, pp=pp, recompute=("none", "layer"), microbatches=4))
    (block,) = choice.chosen.spec.parallel.layers
    assert 0 < len(block.layers) < 6
    assert choice.chosen.prediction.fits
    assert steps[0] < choice.chosen.prediction.step.total < steps[1]
    assert predicted(choice.chosen.spec).memory.peak == choice.chosen.prediction.memory.peak
    assert allows(open_spec(between, pp=pp, recompute=("none", "layer"), microbatches=4), choice.chosen.spec)


def test_a_stated_word_is_kept_and_a_list_limits() -> None:
    choice = choose(open_spec(moe_text(memory="1GB"), tp=2, ep=(1, 4), zero="auto"))
    assert choice.chosen.spec.parallel.tp == 2
    assert choice.chosen.words.keys() <= {"ep", "zero"}
    assert choice.chosen.words["ep"] in (1, 4)
    assert {candidate.words["ep"] for candidate in (choice.chosen, *choice.runners_up)} <= {1, 4}


@each_row("train", ["muon(lr = 1e-3)", "adafactor(lr = 1e-3)", "adamw(lr = 1e-3); frozen = [experts, embedding]"])
def test_without_a_pipeline_estimated_seconds_are_exact(train: str) -> None:
    """Of layers of two kinds, whose matrices an update takes together, and of weights that are gathered only."""
    text = moe_text(levels=FOUR, batch=16, optimizer=train, memory="1GB")
    spec = open_spec(text, **dict.fromkeys(("tp", "ep", "zero", "recompute", "microbatches"), "auto"))
    assert [each.seconds for each in near(spec, number=12, seed=0)] == pytest.approx([1] * 12, rel=1e-9)


def test_estimates_of_pipelines_are_near() -> None:
    """Of Mixtral 8x22B on 128 ranks; benchmarks/bench_search.py has more."""
    spec = open_file("mixtral_8x22b", nodes=16, batch=1024)
    spec = spec.replace(parallel=spec.parallel.replace(pp=(4, 8, 14, 16), tp=2, cp=1, ep=4, etp=1, dp="auto"))
    spec = spec.replace(parallel=spec.parallel.replace(microbatches=(16, 32, 64, 128)))
    found = list(near(spec, number=12, seed=0))
    assert {each.words["schedule"] for each in found} > {"one_f_one_b", "interleaved"}
    assert all(0.88 < each.seconds < 1.13 and 0.85 < each.memory < 1.35 for each in found), found
    assert statistics.median(each.seconds for each in found) == pytest.approx(1, abs=0.02)
    assert statistics.median(each.memory for each in found) == pytest.approx(1, abs=0.05)


def test_a_gate_over_a_group_keeps_the_words_of_its_group() -> None:
    text = moe_text(gate="expert_choice(2)", balance="[]", beside="group = batch", memory="1GB")
    with pytest.raises(DiagnosticError, match="MOE0503"):
        choose(open_spec(text, microbatches="auto"))
    assert choose(open_spec(text, microbatches=2, tp="auto")).candidates > 1


@each_row(
    ("beside", "words", "code"),
    [
        ("group = batch", {"pp": "auto"}, "MOE0503"),
        ("", {"tp": "auto", "ep": (3,)}, "MOE0505"),
        ("", {"pp": ()}, "MOE0505"),
        ("group = rank", {"microbatches": "auto", "dp": 4}, "MOE0503"),
        ("balance = [device_loss(0.01)]", {"ep": "auto"}, "MOE0503"),
        ("", {"ep": (3, 5)}, "MOE0311"),
        ("", {"pp": (8,)}, "MOE0378"),
    ],
)
def test_a_word_that_changes_results_or_breaks_a_rule_is_refused(
    beside: str, words: dict[str, object], code: str
) -> None:
    text = moe_text(beside=beside, balance="[]" if "device" in beside else "[switch_loss(0.1)]")
    if "device" in beside:
        text = text.replace("balance = []; ", "").replace("balance = []", "")
    with pytest.raises(DiagnosticError) as refused:
        choose(open_spec(text, **words))
    assert code in {problem.code for problem in refused.value.diagnostics}
