"""The text form: prints, and reads back as an equal Program."""

import pytest
from models import moe_spec

from moec.passes.ir.parse import parse_program
from moec.passes.ir.text import print_program
from moec.passes.pipeline import PASS_NAMES, compile_program


@pytest.mark.parametrize("stop_after", PASS_NAMES)
@pytest.mark.parametrize("spans", [True, False])
def test_text_reads_back_as_the_same_program_after_every_pass(stop_after: str, spans: bool):
    program = compile_program(moe_spec(), stop_after).program
    assert parse_program(print_program(program, spans=spans)) == program


def test_the_text_of_a_changed_program_is_another():
    one, two = (print_program(compile_program(moe_spec(gate=f"topk({k})")).program) for k in (1, 2))
    assert one != two


def test_text_cites_the_line_of_each_op():
    text = print_program(compile_program(moe_spec()).program)
    assert next(line for line in text.splitlines() if "= route" in line).endswith("# tiny.moe:11")


def test_awkward_numbers_survive():
    program = compile_program(moe_spec(balance="[switch_loss(1e-30), z_loss(0.1)]")).program
    assert parse_program(print_program(program)).block("layers[1..2]") == program.block("layers[1..2]")
