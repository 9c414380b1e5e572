"""The text form: prints, and reads back as an equal Program."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans import moe_spec
from support.tables import each_row

from moec.driver import run_passes, to_spec
from moec.open_words import stated
from moec.passes.ir import Op, Program, SourceLine
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.attributes import attribute_types
from moec.passes.ir.ops.linear_ops import Activation
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.pipeline import PASS_NAMES, compile_program

ROOT = Path(__file__).parents[3]
FILES = [*sorted((ROOT / "examples").glob("*.moe")), *sorted((ROOT / "tests/cases").glob("*.moe"))]


def lines_of(program: Program) -> list[str]:
    """The source line of everything that has one."""
    return [str(located.span) for block in program.blocks for located in (block, *block.parameters, *block.ops)]


@each_row("stop_after", PASS_NAMES)
@each_row("spans", [True, False])
def test_text_reads_back_as_the_same_program_after_every_pass(stop_after: str, spans: bool):
    program = compile_program(moe_spec(), stop_after).program
    read = parse_program(print_program(program, spans=spans))
    assert read == program
    assert lines_of(read) == (lines_of(program) if spans else ["None"] * len(lines_of(program)))


@each_row("file", FILES)
def test_programs_of_our_own_files_read_back_with_their_lines_and_pass_every_check(file: Path):
    program = run_passes(stated(to_spec(file))).program
    read = parse_program(print_program(program))
    assert read == program
    assert lines_of(read) == lines_of(program)
    check_program(read)


def test_the_text_of_a_changed_program_is_another():
    one, two = (print_program(compile_program(moe_spec(gate=f"topk({k})")).program) for k in (1, 2))
    assert one != two


def test_text_says_how_a_parameter_is_sharded_until_its_layout_does():
    lowered, sharded = (print_program(compile_program(moe_spec(tp=2), name).program) for name in ("lower", "shard"))
    head = "parameter @head.weight: fp32[32, 16]"
    assert f"{head} = normal(0.02) decays shard(tp = 0) matrices(0, 1) at" in lowered
    assert f"{head} @ tp:shard(0) = normal(0.02) decays matrices(0, 1) at" in sharded


def test_text_cites_the_line_of_each_op():
    text = print_program(compile_program(moe_spec()).program)
    assert text.startswith('program "tiny" from "tiny.moe" {\n')
    assert next(line for line in text.splitlines() if "= route" in line).endswith(" at 11")


def test_a_line_of_another_source_names_it():
    program = compile_program(moe_spec()).program
    first, *others = program.blocks
    moved = replace(first, ops=(replace(first.ops[0], span=SourceLine("library:other.moe", 14)), *first.ops[1:]))
    program = replace(program, blocks=(moved, *others))
    text = print_program(program)
    assert ' at "library:other.moe" 14\n' in text
    assert lines_of(parse_program(text)) == lines_of(program)


def test_awkward_numbers_survive():
    program = compile_program(moe_spec(balance="[switch_loss(1e-30), z_loss(0.1)]")).program
    assert parse_program(print_program(program)).block("layers[1..2]") == program.block("layers[1..2]")


def test_every_attribute_of_every_op_has_a_type_that_refuses_other_types():
    for op in Op.registry.values():
        for name, type_ in attribute_types(op).items():
            # None stands for an attribute that is left out: no text gives it.
            missing = () if op.attribute_defaults().get(name, 0) is None else (None,)
            for wrong in (*missing, b"", {}, "No Such Word", -(2**70), float("inf")):
                with pytest.raises(ValueError, match="must "):
                    assert type_(wrong), (op, name)


def test_activations_of_the_text_are_those_there_are():
    kinds = attribute_types(Activation)["kind"]
    for kind in ACTIVATIONS:
        assert kinds(kind) == kind


READ_IN_A_PROCESS = """
import sys, time
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.verifier import check_program
text = open(sys.argv[1]).read()
started = time.perf_counter()
check_program(parse_program(text))
print(time.perf_counter() - started)
assert not {"torch", "lark", "jinja2", "pydantic"} & sys.modules.keys()
"""


@pytest.mark.parametrize(("layers", "most"), [(0, 1), (1_000, 1), pytest.param(10_000, 10, marks=pytest.mark.slow)])
def test_reading_imports_no_torch_and_no_lark_and_is_fast(tmp_path: Path, layers: int, most: float):
    """Of a model as large as DeepSeek's, and of many layers."""
    file = ROOT / "tests/cases/deepseek_sized.moe"
    program = compile_program(moe_spec(depth=layers) if layers else to_spec(file)).program
    (tmp_path / "program.ir").write_text(print_program(program))
    started = time.perf_counter()
    command = [sys.executable, "-c", READ_IN_A_PROCESS, str(tmp_path / "program.ir")]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Measured 0.04 s, 0.1 s and 1.0 s; a busy machine may take ten times as long.
    assert float(shown) < most, time.perf_counter() - started
