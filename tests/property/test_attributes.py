"""Every attribute of every op: a rule refuses another value, or `moec verify` finds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mutations import broken_rule
from support.plans import BODY, FOUR, moe_plan
from support.tables import each_row
from support.verified import require_equal
from support.wrong_plans import change_every, change_ops, op_giving, with_program

import moec
from moec.codegen.plan import Plan
from moec.grammar.resolve.library import library_names
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir import Block, Op, Program, Value
from moec.passes.ir.attributes import attribute_types
from moec.passes.ir.ops import Activation, Attention, BoundFar, ChooseTokens, Clip, ExpertMlp, Route
from moec.passes.partition import Partition
from moec.passes.pipeline import compile_program
from moec.runtime.verify.program_differences import first_attribute_difference
from moec.runtime.verify.verification import verify

WORDS = sorted((Path(__file__).parents[1] / "words").glob("*.moe"))
OTHERS = ("softmax", "sigmoid", "none", "before", "after", "swiglu", "gelu", "relu", "sequence", "batch", "rank", "sum",
          "max", "top2_sum", "fp16")  # fmt: skip


def plans() -> Iterator[Plan]:
    """Plans with every op of the registry."""
    yield from map(moec.compile, WORDS)
    yield moe_plan(tp=4, ep=2, ffn="conv(4)", attention="gqa(heads = 4, kv_heads = 2)")
    yield from (moe_plan(ranks=2 * ep, ep=ep, etp=2) for ep in (1, 2))


def changed(program: Program) -> Iterator[tuple[str, str, Program]]:
    """For the first op of each kind, each of its attributes with another value."""
    seen = set[type[Op]]()
    for block in program.blocks:
        for op in block.ops:
            if type(op) in seen:
                continue
            seen.add(type(op))
            for name in op.attribute_names():
                for value in other_values(op, name, program):
                    ops = tuple(replace(op, **{name: value}) if each is op else each for each in block.ops)
                    blocks = tuple(replace(each, ops=ops) if each is block else each for each in program.blocks)
                    yield op.mnemonic, name, replace(program, blocks=blocks)


def other_values(op: Op, name: str, program: Program) -> list[Any]:
    old: Any = getattr(op, name)
    match old:
        case bool():
            given: list[Any] = [not old]
        case int():
            given = [2 * old + 1, old + 1, old - 1]
        case float():
            given = [old * 1.5 + 0.25]
        case tuple():
            given = [tuple(2 * number for number in old) or (0.5,)]
        case None:
            given = [0.75]
        case _ if name == "block":  # a body that backward recomputes in another part is the same function
            body = replace(program.block(old), recompute="none")
            given = [each.name for each in program.blocks if replace(each, name=old, recompute="none") != body]
        case _:
            given = [*(axis for mesh in program.meshes for axis, _ in mesh.axes), *OTHERS]
    return [value for value in given if value != old and is_valid(op, name, value)]


def is_valid(op: Op, name: str, value: Any) -> bool:
    try:
        attribute_types(type(op))[name](value)
    except ValueError:
        return False
    return True


def is_found(plan: Plan, wrong: Program) -> bool:
    """Whether `verify` finds it without a number, or a rule refuses it at load."""
    return (
        first_attribute_difference(wrong, plan.program) is not None
        or broken_rule(with_program(plan, wrong)) is not None
    )


def test_another_value_of_any_attribute_of_any_op_is_refused_or_found():
    tried: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for plan in plans():
        for mnemonic, name, wrong in changed(plan.program):
            tried[mnemonic, name].append(is_found(plan, wrong))
    every = {(mnemonic, name) for mnemonic, kind in Op.registry.items() for name in kind.attribute_names()}
    assert every - tried.keys() == set()
    assert [pair for pair, found in tried.items() if not all(found)] == []


@each_row("name", library_names("models"))
def test_so_is_that_of_the_librarys_models(name: str):
    plan = moec.compile(f'use "models/{name}"\n')
    found = {(op, name): is_found(plan, wrong) for op, name, wrong in changed(plan.program)}
    assert len(found) > 10
    assert all(found.values()), found


def with_attribute(plan: Plan, kind: type[Op], name: str, value: object) -> Plan:
    """The plan with this attribute in each op of a kind that has another than none and zero."""
    return change_every(plan, kind, lambda op: replace(op, **{name: value}) if getattr(op, name) else op)


WINDOW = "gqa(heads = 4, kv_heads = 2, window = {}, rope = rope())"


@each_row(
    ("options", "kind", "attribute", "value", "words"),
    [
        ({"attention": WINDOW.format(200), "sequence": 256}, Attention, "window", 300, "window = 300 instead of 200"),
        ({"gate": "topology(2, share = 0.01)", "levels": FOUR, "balance": "[]"}, BoundFar, "whole", 101, "whole = 101"),
        ({"gate": "expert_choice(1.5)", "balance": "[]"}, ChooseTokens, "parts", 4, "parts = 4 instead of 3"),
        ({}, Route, "order", "after", "order = after instead of before"),
    ],
)
def test_verify_names_an_attribute_that_its_inputs_do_not_show(
    options: dict[str, Any], kind: type[Op], attribute: str, value: object, words: str, tmp_path: Path
):
    plan = moe_plan(**options)
    wrong = with_attribute(plan, kind, attribute, value).save(tmp_path / "wrong.plan")
    report = verify(moec.load(wrong), float32=False)
    assert not report.ok
    assert report.first_difference.unlike
    assert words in str(report.first_difference)


def test_numbers_show_windows_clips_and_clamps_too():
    attention = "gqa(heads = 4, kv_heads = 2, window = 32, clip = 8, qk_norm = head, rope = rope())"
    expert = "swiglu(16, clamp = 7)"
    plan = moe_plan(depth=2, ranks=2, sequence=64, attention=attention, expert=expert, ffn=expert)
    faults = [(Attention, "window", 48), (Clip, "limit", 9.0), (ExpertMlp, "clamp", 8.0), (Activation, "clamp", None)]
    for scale in (False, True):
        require_equal(plan, scale=scale, float32=False)
        for kind, name, value in faults:
            report = verify(with_attribute(plan, kind, name, value), scale=scale, float32=False)
            assert max(report.max_output_error, report.max_gradient_error) > 1e-4, name


def unfused(plan: Plan) -> Plan:
    """The plan with a permutation, experts and a sum in place of each mixture that is one op."""
    program = compile_program(plan.spec, "communicate").program
    return with_program(plan, Partition(plan.spec, choose_degrees(plan.spec)).apply(program))


def test_a_plan_of_other_ops_or_degrees_equals_the_model_and_its_faults_are_found():
    clamped = moe_plan(ep=1, expert="swiglu(16, clamp = 7)")
    apart = unfused(clamped)
    assert apart.program != clamped.program
    require_equal(apart, float32=False)
    assert not verify(with_attribute(apart, ExpertMlp, "clamp", 8.0), float32=False).ok
    other = moe_plan(ranks=8, tp=2, ep=4)
    require_equal(replace(moe_plan(ranks=8, ep=2, zero=3), program=other.program, groups=other.groups), float32=False)


def test_an_attribute_is_found_under_other_names():
    plan = moe_plan(attention=WINDOW.format(200), sequence=256)
    blocks = tuple(renamed(block) if block.name == BODY else block for block in plan.program.blocks)
    other = with_program(plan, replace(plan.program, blocks=blocks))
    assert first_attribute_difference(other.program, plan.program) is None
    found = first_attribute_difference(with_attribute(other, Attention, "window", 300).program, plan.program)
    assert (found.value, found.attribute) == ("other.attended", "window = 300 instead of 200")
    wrong = with_attribute(other, Attention, "window", 300)
    unused = replace(op_giving(other, BODY, "other.attended"), results=op_giving(plan, BODY, "attended").results)
    found = first_attribute_difference(change_ops(wrong, BODY, lambda ops: [*ops, unused]).program, plan.program)
    assert (found.value, found.attribute) == ("other.attended", "window = 300 instead of 200")


def renamed(block: Block) -> Block:
    """The block with other names for all values that its ops give."""
    names = {value.name: f"other.{value.name}" for op in block.ops for value in op.results}

    def of(value: Value) -> Value:
        ragged = names.get(value.ragged, value.ragged) if value.ragged else None
        return replace(value, name=names[value.name], ragged=ragged)

    ops = tuple(
        replace(op, operands=tuple(names.get(name, name) for name in op.operands), results=tuple(map(of, op.results)))
        for op in block.ops
    )
    outputs = tuple(replace(output, name=names.get(output.name, output.name)) for output in block.outputs)
    return replace(block, ops=ops, outputs=outputs)
