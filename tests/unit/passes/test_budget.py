"""The budget: plans that do not fit, and the change that is proposed, which is compiled again here."""

from __future__ import annotations

import pytest
from support.plans import moe_text
from support.tables import each_row

from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.grammar.spec import Spec
from moec.passes.budget import gigabytes
from moec.passes.cost.memory import memory_of
from moec.passes.pipeline import compile_program

SIZES = {"dim": 64, "expert": "swiglu(128)", "batch": 16, "sequence": 64}


def text_of(memory: float, parallel: str = "", **options: object) -> str:
    device = f'device "small" {{ kind = cpu; memory = {memory}B; bandwidth = 10GB/s }}\n'
    text = moe_text(**SIZES | options).replace("device = cpu", "device = small")  # type: ignore[arg-type]
    return device + text.replace("parallel {", f"parallel {{ {parallel}")


def peak_of(parallel: str = "", **options: object) -> float:
    spec = load_text(text_of(1e12, parallel, **options)).unwrap()
    return memory_of(compile_program(spec).program, spec).peak.bytes.total


def refusal(text: str) -> Diagnostic:
    with pytest.raises(DiagnosticError) as raised:
        compile_source(text)
    (diagnostic,) = raised.value.diagnostics
    assert diagnostic.code == "MOE0501"
    return diagnostic


@pytest.mark.parametrize(
    "words", ["zero = 1", "zero = 3", "microbatches = 4", "zero = 3; recompute = layer; microbatches = 4"]
)
def test_the_proposed_words_fit_and_save_what_they_say(words: str) -> None:
    """The device has what the words need, and a little more."""
    memory = round(1.001 * peak_of(words))
    assert memory < peak_of()
    proposed = refusal(text_of(memory)).help
    change, _, fits = proposed.partition(": ")
    assert fits.startswith("they fit (" if change.count(" = ") > 1 else "it fits (")
    written = "; ".join(word.strip("`") for word in change.removeprefix("set ").split(", "))
    compile_source(text_of(memory, written + ";", **{"ep": None} if "ep = " in written else {}))


def test_one_word_is_proposed_where_one_is_enough() -> None:
    assert peak_of("zero = 1", sequence=48) < peak_of(sequence=48)
    diagnostic = refusal(text_of(round(1.001 * peak_of("zero = 3", sequence=48)), sequence=48))
    change, _, fits = diagnostic.help.partition(": ")
    assert change.count(" = ") == 1
    assert fits.startswith("it fits (")
    assert fits.endswith(")")


def test_a_change_that_leaves_room_comes_first_and_one_that_does_not_says_so() -> None:
    """`zero = 1` alone would leave none."""
    roomy = refusal(text_of(round(1.001 * peak_of("zero = 1")))).help
    assert roomy.count(" = ") > 1
    assert roomy.endswith(")")
    least = peak_of("ep = 4; zero = 1; recompute = layer; microbatches = 4", ep=None)
    assert "; less than 10% stay free" in refusal(text_of(round(1.001 * least))).help


def test_the_refusal_names_the_device_the_batch_and_the_largest_tenants() -> None:
    diagnostic = refusal(text_of(1e6, ranks=1, ep=1))
    assert [label.message for label in diagnostic.labels] == ["small has 1 MB", "16 sequences over all ranks"]
    assert "most in the backward of layer" in diagnostic.message
    assert all(word in diagnostic.message for word in ("optimizer", "parameters", "MB"))
    assert diagnostic.help.startswith("none of the changes tried fits")


def test_a_file_without_a_step_is_not_refused() -> None:
    text = text_of(1e6)
    spec: Spec = load_text(text).unwrap()
    compile_source(spec.replace(train=None))


@each_row(
    ("size", "memory", "text"),
    [(61.3e9, 80e9, "61.3 of 80 GB"), (5.349e14, 80e9, "535 TB of 80 GB"), (2e18, 72e6, "2 EB of 72 MB")],
)
def test_a_size_has_the_unit_that_it_needs(size: float, memory: float, text: str) -> None:
    assert gigabytes(size, memory) == text
