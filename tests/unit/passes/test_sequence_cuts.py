"""Sequences that tp does not divide: allowed exactly where a plan cuts no sequence."""

from __future__ import annotations

import re

import pytest
from support.plans import moe_text
from support.tables import each_row

from moec.driver import compile as compile_source
from moec.driver import verify
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.degrees.sequence_cuts import sequence_pieces
from moec.passes.ir import Program, Shard
from moec.passes.pipeline import compile_program

MODELS = {
    "dense": {},
    "vocabulary whole": {"vocab": 31},
    "latent attention": {"attention": "mla(heads = 4, kv_rank = 8, nope_dim = 4, rope_dim = 4, value_dim = 4)"},
    "norm of each head": {"attention": "mha(heads = 4, qk_norm = head, rope = rope())"},
    "norm of projections": {"attention": "mha(heads = 4, qk_norm = projection)"},
    "heads of a mixture": {"attention": "moa(heads = 2, experts = 4, gate = topk(2))"},
    "conv": {"ffn": "conv(8)"},
    "packed": {"model": "embedding = tokens(separator = 2, positions = learned)"},
    "post": {"model": "norm_place = res_post"},
    "parallel residual": {"model": "parallel_residual = one_norm"},
    "topk": {"gate": "topk(2)"},
    "soft": {"gate": "soft(2)"},
    "hash": {"gate": "hash(2)"},
    "dense gate": {"gate": "dense"},
}  # fmt: skip
CUT = {"norm of projections", "heads of a mixture", "topk", "soft", "hash", "dense gate"}


def text(name: str, *, sequence: int = 8, sequence_parallel: bool = False) -> str:
    options = {"vocab": 32, "attention": "mha(heads = 4)", "ffn": "gelu(32)", **MODELS[name]}
    given = moe_text(
        ranks=2,
        tp=2,
        ep=None,
        sequence=sequence,
        sequence_parallel=sequence_parallel,
        balance="[]",
        **{word: options[word] for word in ("gate", "model", "ffn") if word in options},
    )
    given = given.replace("mha(heads = 4)", str(options["attention"])).replace(
        "vocab = 32", f"vocab = {options['vocab']}"
    )
    return given if "gate" in options else re.sub(r"  layers 1\.\.2 \{.*?\n  \}\n", "", given, flags=re.DOTALL)


def cuts_a_sequence(program: Program) -> bool:
    values = [value for block in program.blocks for op in block.ops for value in op.results]
    cuts = [(value, value.layout.get("tp")) for value in values if value.layout is not None]
    return any(isinstance(cut, Shard) and value.shape[cut.dim] == "sequence" for value, cut in cuts)


@each_row("name", MODELS)
def test_a_spec_says_whether_its_plan_cuts_a_sequence(name: str) -> None:
    for sequence_parallel in (False, True):
        spec = load_text(text(name, sequence_parallel=sequence_parallel)).unwrap()
        cut = cuts_a_sequence(compile_program(spec).program)
        assert sequence_pieces(spec) == (2 if cut else 1)
        assert cut == (sequence_parallel or name in CUT)


@each_row("name", sorted(set(MODELS) - CUT))
def test_a_plan_that_cuts_no_sequence_computes_odd_ones(name: str) -> None:
    plan = compile_source(load_text(text(name, sequence=7)).unwrap())
    assert plan.spec.train is not None
    assert plan.spec.train.sequence == 7
    assert verify(plan).ok


@each_row("name", sorted(CUT))
def test_a_plan_that_cuts_a_sequence_refuses_odd_ones(name: str) -> None:
    with pytest.raises(DiagnosticError, match=r"MOE0319.*7 tokens over 2 ranks"):
        compile_source(load_text(text(name, sequence=7)).unwrap())
    with pytest.raises(DiagnosticError, match=r"MOE0319"):
        compile_source(load_text(text("dense", sequence=7, sequence_parallel=True)).unwrap())
