"""The parts of a model that `frozen` names: every parameter belongs to one."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from support.plans import moe_spec
from support.tables import each_row

from moec.driver import to_spec
from moec.grammar.checking.rules import check
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import ModelPart, Spec
from moec.passes.ir import Program
from moec.passes.lower.lower_frozen import PARTS, part_of
from moec.passes.lower.lower_model import lower

CASES = sorted((Path(__file__).parents[2] / "cases").glob("**/*.moe"))


def names_of(program: Program) -> set[str]:
    return {p.name for block in program.blocks for p in block.parameters}


def test_every_word_has_a_part():
    assert set(PARTS) == set(get_args(ModelPart))


@each_row("file", CASES)
def test_every_parameter_belongs_to_exactly_one_part(file: Path):
    for name in names_of(lower(to_spec(file))):
        of = [part for part, words in PARTS.items() if any(f"{name}.".startswith(f"{word}.") for word in words)]
        assert of == [part_of(name)], name


def parted(frozen: str, **options: object) -> Spec:
    return moe_spec(optimizer=f"sgd(lr = 0.1); frozen = [{frozen}]", **options)


def test_each_word_freezes_its_parameters_and_no_others():
    beside = "shared = swiglu(4, gated = true); residual = gelu(4)"
    for part in get_args(ModelPart):
        program = lower(parted(part, beside=beside, model="embedding = tokens(positions = learned)"))
        for block in program.blocks:
            for p in block.parameters:
                assert p.frozen == (part_of(p.name) == part), (part, p.name)


@each_row(
    ("frozen", "options", "code"),
    [
        ("residual", {}, "MOE0342"),
        ("shared", {}, "MOE0342"),
        ("head", {"model": "embedding = tokens(tied = true)"}, "MOE0342"),
        ("gate", {"gate": "hash(2)", "balance": "[]"}, "MOE0342"),
        ("embedding, attention, norms, ffn, experts, gate, head", {}, "MOE0343"),
        (
            "embedding, attention, norms, ffn, experts, head",
            {"gate": "hash(2)", "balance": "[]"},
            "MOE0343",
        ),
    ],
)
def test_a_part_that_is_not_there_and_a_model_without_any_other_are_refused(
    frozen: str, options: dict[str, object], code: str
):
    with pytest.raises(DiagnosticError, match=code):
        parted(frozen, **options)


def test_a_spec_made_in_python_is_checked_too():
    spec = moe_spec()
    assert spec.train is not None
    wrong = spec.replace(train=spec.train.replace(frozen=("shared",)))
    assert [d.code for d in check(wrong)] == ["MOE0342"]
