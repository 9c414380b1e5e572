"""Programs that read but that no pass wrote: `check_program` refuses them and names the op and its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models import moe_spec

from moec.grammar.diagnostics import InternalError
from moec.passes.ir import IrError
from moec.passes.ir.parse import parse_program
from moec.passes.ir.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.pipeline import compile_program

CASES = Path(__file__).parents[2] / "cases"
TEXT = print_program(compile_program(moe_spec(depth=2)).program)
NORM = "%h = rms_norm %x, @attention_norm.weight {eps = 1e-05} : "


@pytest.mark.parametrize("file", ["layer", "padding"])
def test_an_op_with_another_number_of_operands_is_refused_with_its_line(file: str):
    lines = (CASES / f"{file}.ir").read_text().splitlines()
    valid = set()
    for number, line in enumerate(lines):
        found = re.fullmatch(r"(    %.* = (\w+) )([^{:]*)( [{:].* at (\d+))", line)
        if found is None:
            continue
        operands = found[3].split(", ")
        for changed in ([*operands, operands[-1]], [*operands, operands[0]], operands * 40, operands[:-1]):
            changed_line = f"{found[1]}{', '.join(changed)}{found[4]}"
            refusal = refused_by_any("\n".join([*lines[:number], changed_line, *lines[number + 1 :], ""]))
            if refusal is None:
                valid.add(found[2])
            elif changed:
                assert f"= {found[2]} ({file}.moe:{found[5]})" in refusal
            else:
                assert f"line {number + 1}: " in refusal
    # The last two take `real_tokens` or leave it.
    assert valid <= {"add", "switch_loss", "z_loss"}


def refused_by_any(text: str) -> str | None:
    """Why reading or checking refuses `text`; None where nothing does."""
    try:
        check_program(parse_program(text))
    except (IrError, InternalError) as error:
        return str(error)
    return None


CHECKED = {
    "an operand of another type": ("%active, @ffn.down.weight", "%active, @ffn.up.weight", "linear"),
    "an expert mesh that is gone": (' on "experts[1]"', "", "axes are"),
    "a result of another dtype": (f"{NORM}fp32", f"{NORM}bf16", "the rule says"),
    "an input that is a partial sum": ("dp:shard(0)) at 6", "dp:partial(sum)) at 6", "given as a partial sum"),
    "a sum over an axis that is not there": ("ones sum_over(dp)", "ones sum_over(zz)", "axes are"),
    "a gradient that is not summed": ("ones sum_over(dp)", "ones sum_over()", "is summed over"),
    "no gradient rule": ("ones sum_over(dp)", "ones", "no gradient rule"),
    "a collective over no axis": ("{axis = ep}", "{axis = zz}", "there is no axis zz"),
    "experts on another number of ranks": ("edp = 2, ep = 2", "edp = 2, ep = 4", "different rank counts"),
    "tokens on another dim": ("tokens @ dp:shard(0)", "tokens @ dp:shard(1)", "tokens do not lie"),
    "experts that cannot be cut": (None, None, "dim 0 of 8 is cut into 3 pieces"),
    "a layer that runs twice": ("layer = 1}", "layer = 0}", "layer 0 runs twice"),
    "a block in no stage": (', "aux_loss"}', "}", "stages"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CHECKED)
def test_a_program_that_reads_but_breaks_a_rule_is_refused(fault: str):
    old, new, words = CHECKED[fault]
    if old is None:
        text = TEXT.replace("dp = 4", "dp = 3").replace("edp = 2, ep = 2", "edp = 1, ep = 3")
        text = re.sub(r"edp:shard\(\d\) (ep:)", r"\1", text).replace("sum_over(edp)", "sum_over()")
        text = text.replace("edp:shard(0) ", "").replace("edp:shard(1) ", "")
    else:
        assert old in TEXT
        text = TEXT.replace(old, new, 1)
    program = parse_program(text)
    with pytest.raises(InternalError, match=words):
        check_program(program)
