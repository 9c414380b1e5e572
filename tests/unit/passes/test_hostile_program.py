"""Programs that parse but that no pass wrote: `check_program` refuses them and names the op and its line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from support.plans import moe_spec
from support.tables import each_row

from moec.grammar.diagnostics import InternalError
from moec.passes.ir import IrError
from moec.passes.ir.interface import has_interface
from moec.passes.ir.roles import ROLES, Role
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.pipeline import compile_program

CASES = Path(__file__).parents[2] / "cases"
TEXT = print_program(compile_program(moe_spec(depth=2, model="embedding = tokens(padding = 3)")).program)
BODY = "layers[1]"
NORM = "%h = rms_norm %x, @attention_norm.weight {eps = 1e-05} : "


@each_row("file", ["layer", "padding"])
def test_an_op_with_another_number_of_operands_is_refused_with_its_line(file: str):
    lines = (CASES / f"{file}.ir").read_text().splitlines()
    valid, tried = set(), set()
    for number, line in enumerate(lines):
        found = re.fullmatch(r"(    %.* = (\w+) )([^{:]*)( [{:].* at (\d+))", line)
        if found is None:
            continue
        operands = found[3].split(", ")
        if (form := (found[2], len(operands))) in tried:
            continue
        tried.add(form)
        for changed in ([*operands, operands[-1]], [*operands, operands[0]], operands * 40, operands[:-1]):
            changed_line = f"{found[1]}{', '.join(changed)}{found[4]}"
            refusal = refused_by_any("\n".join([*lines[:number], changed_line, *lines[number + 1 :], ""]))
            if refusal is None:
                valid.add(found[2])
            else:  # by its rule, or as it is read: nothing, or an operand after one with a name
                assert f"= {found[2]} ({file}.moe:{found[5]})" in refusal or f"line {number + 1}: " in refusal
    # `add` takes any number; the others have an optional operand, `real` or `weights`, which was the last.
    assert valid <= {"add", "switch_loss", "z_loss", "expert_mlp", "expert_mlp_padded"}


def refused_by_any(text: str) -> str | None:
    """The error of reading or checking `text`, or None."""
    try:
        check_program(parse_program(text))
    except (IrError, InternalError) as error:
        return str(error)
    return None


CHECKED = {
    "an operand of another type": ("%active, @ffn.down.weight", "%active, @ffn.up.weight", "linear"),
    "an expert mesh that is gone": (' on "experts[1]"', "", "axes are"),
    "a result of another dtype": (f"{NORM}fp32", f"{NORM}bf16", "the rule says"),
    "an input that is a partial sum": ("dp:shard(0) as res", "dp:partial(sum) as res", "given as a partial sum"),
    "a sum over an axis that is not there": ("ones sum_over(dp)", "ones sum_over(zz)", "axes are"),
    "a gradient that is not summed": ("ones sum_over(dp)", "ones sum_over()", "is summed over"),
    "a layout and a shard": ("ones sum_over(dp)", "ones shard(ep = 0) sum_over(dp)", "says how to shard it"),
    "no gradient rule": ("ones sum_over(dp)", "ones", "no gradient rule"),
    "a collective over no axis": ("{axis = ep}", "{axis = zz}", "there is no axis zz"),
    "experts on another number of ranks": ("edp = 2, ep = 2", "edp = 2, ep = 4", "different rank counts"),
    "tokens on another dim": ("tokens @ dp:shard(0)", "tokens @ dp:shard(1)", "the residual stream cannot have dp"),
    "experts that cannot be cut": (None, None, "dim 0 of 8 is cut into 3 pieces"),
    "tokens that are labels": ("as tokens)", "as labels)", "forward takes labels"),
    "logits of no role that a job asks for": ("%logits as logits", "%logits as residual", "gives residual first"),
    "balance twice": ("%balance as balance,", "%balance as balance, %balance as balance,", "two outputs of one role"),
    "counts twice": ("%counts_1 as counts(1)", "%counts_1 as counts(1), %counts_1 as counts(1)", "of one role"),
    "counts of a layer there is not": ("as counts(1)", "as counts(2)", "the counts that its layers give"),
    "counts of no layer": ("as counts(1)", "as counts", "forward gives more than"),
    "no counts": (", %counts_1 as counts(1)", "", "the counts that its layers give"),
    "a layer that gives logits": ("return %x.2 as residual", "return %x.2 as logits", r"layers\[0\] gives logits"),
    "a layer that takes labels": ("as real) at", "as labels) at", r"layers\[1\] takes residual, labels"),
    "a layer that takes x twice": ("as real) at", "as residual) at", "two inputs of one role"),
    "a role that nothing uses": ("as real) at", "as routes) at", "has the role routes"),
    "ids that are handed on for marks": ("as real) at", "as tokens) at", "hands layer 1 %real as tokens"),
    "a loss of other roles": ("as labels, %valid", "as tokens, %valid", "loss takes logits, tokens, valid"),
    "a loss that is a count": ("%loss.1 as loss", "%loss.1 as valid", "in loss %loss.1 has the role valid"),
    "a count that is another": ("%count.1 as valid", "%count.1 as num_tokens", "valid_labels does not give"),
    "a stage that runs the loss": ('runs "forward"', 'runs "loss"', "forward takes labels, valid beside"),
}  # fmt: skip


@each_row("kind", ["head", "projection"])
@each_row("given", ["dp", "tp", ""])
def test_a_gradient_of_a_norm_of_heads_that_is_not_summed_over_dp_and_tp_is_refused(kind: str, given: str):
    text = print_program(compile_program(moe_spec(tp=2, qk_norm=kind)).program)
    changed = re.sub(r"(@attention.q_norm.weight: .*) sum_over\(dp_cp_tp\)", rf"\1 sum_over({given})", text)
    assert changed != text
    with pytest.raises(InternalError, match=r"rms_norm .*the gradient of @attention.q_norm.weight is summed over"):
        check_program(parse_program(changed))


@each_row("given", ["16, 4, 4", "8, 4, 4"])
def test_a_norm_over_other_dims_than_its_weight_is_refused(given: str):
    text = print_program(compile_program(moe_spec(tp=2, qk_norm="projection")).program)
    changed = text.replace("@attention.q_norm.weight: fp32[4, 4]", f"@attention.q_norm.weight: fp32[{given}]")
    assert changed != text
    assert "rms_norm" in (refused_by_any(changed) or "")


@each_row("fault", CHECKED)
def test_a_program_that_reads_but_breaks_a_rule_is_refused(fault: str):
    old, new, words = CHECKED[fault]
    if old is None:
        text = (
            TEXT.replace("dp = 4", "dp = 3")
            .replace("on ranks 0..3", "on ranks 0..2")
            .replace("edp = 2, ep = 2", "edp = 1, ep = 3")
        )
        text = re.sub(r"edp:shard\(\d\) (ep:)", r"\1", text).replace("sum_over(edp)", "sum_over()")
        text = text.replace("edp:shard(0) ", "").replace("edp:shard(1) ", "")
    else:
        assert old in TEXT
        text = TEXT.replace(old, new, 1)
    program = parse_program(text)
    with pytest.raises(InternalError, match=words):
        check_program(program)


OF_ANOTHER_TYPE = {
    "tokens of another dtype": ("forward", "tokens", {"dtype": "fp32"}, "in forward %tokens has the role tokens"),
    "tokens of another shape": ("forward", "tokens", {"shape": ("batch",)}, "in forward %tokens has the role tokens"),
    "tokens of a constant batch": ("forward", "tokens", {"shape": (4, "sequence")}, "has the role tokens"),
    "a residual of whole numbers": (BODY, "residual", {"dtype": "int64"}, "%x has the role residual"),
    "marks of another dtype": (BODY, "real", {"dtype": "bf16"}, "%real has the role real, which is 1 for"),
    "a count that is no scalar": ("loss", "valid", {"shape": ("batch",)}, "in loss %valid has the role valid"),
    "logits of another vocabulary": (
        "loss",
        "logits",
        {"shape": ("batch", "sequence", 8)},
        "loss takes another logits",
    ),
    "labels without a role": ("loss", "labels", {"role": None}, "loss takes %labels, which has no role"),
}


@each_row("fault", OF_ANOTHER_TYPE)
def test_a_role_has_a_type(fault: str):
    name, role, update, words = OF_ANOTHER_TYPE[fault]
    program = parse_program(TEXT)
    block = program.block(name)
    inputs = tuple(replace(value, **update) if value.role == role else value for value in block.inputs)
    changed = replace(block, inputs=inputs)
    blocks = tuple(changed if each is block else each for each in program.blocks)
    has_interface(program)
    with pytest.raises(InternalError, match=re.escape(words)):
        has_interface(replace(program, blocks=blocks))


def test_every_role_has_a_line_in_the_table():
    assert set(ROLES) == set(get_args(Role))
