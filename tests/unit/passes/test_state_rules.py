"""States: their text, which block may read, update and give them, and which texts and Programs are refused."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from support.plans import moe_plan, moe_spec
from support.tables import each_row
from support.wrong_plans import change_block

from moec.codegen.plan import Plan
from moec.grammar.diagnostics import InternalError
from moec.passes.cost.totals import costs_of, tally
from moec.passes.ir import REPLICATED, Init, IrError, Layout, Output, Shard, State, Value
from moec.passes.ir.op import Placing, TypeRuleError, gradient_sums
from moec.passes.ir.ops import AllGather, MoveBias, Route, SumSources
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import PASS_NAMES, compile_program

SECONDS = 1.0
BODY, UPDATE, NAME = "layers[1..2]", "update[1..2]", "moe.gate.bias"
OPTIONS = {"gate": "topk(2, score = sigmoid, bias = online(0.01))"}
STATE = "state ^moe.gate.bias: fp32[8] @ replicate = zeros"
BIAS = Value(name="b", shape=(8,), dtype="fp32")


def plan() -> Plan:
    return moe_plan(ranks=4, ep=2, **OPTIONS)


TEXT = print_program(plan().program)


# ---- text ------------------------------------------------------------------------------------------------


@each_row("stop_after", PASS_NAMES)
@each_row("degrees", [{}, {"tp": 2, "ep": 4}, {"ranks": 1, "ep": 1}])
def test_text_reads_back_as_the_same_program_after_every_pass(stop_after: str, degrees: dict[str, int]):
    program = compile_program(moe_spec(**OPTIONS, **degrees), stop_after).program
    read = parse_program(print_program(program))
    assert read == program
    assert [str(s.span) for b in read.blocks for s in b.states] == ["tiny.moe:11", "tiny.moe:11"]


def test_a_layer_reads_a_state_and_one_block_updates_it():
    lines = [line.strip() for line in TEXT.splitlines() if "^" in line or UPDATE in line or "sum_sources" in line]
    assert [re.sub(r" : .*| \(%.*", "", line) for line in lines] == [
        f'block "{BODY}" on "experts[1..2]" updated by "{UPDATE}"',
        f"{STATE} at 11".replace(" : ", ": "),
        f"%p, %w, %e = route %logits, bias = ^{NAME} {{k = 2, score = sigmoid, order = before, normalize = false}}",
        f'block "{UPDATE}" final',
        f"{STATE} at 11",
        "%loads = sum_sources %counts",
        f"%moved = move_bias ^{NAME}, %loads.1 {{rate = 0.01}}",
        f"return %moved as state(^{NAME})",
    ]


def test_identical_layers_on_several_meshes_share_the_block_that_updates():
    program = moe_plan(ranks=4, ep=2, mixtures=((8, 2), (8, 4), (16, 1)), **OPTIONS).program
    blocks = {block.name: block.update for block in program.blocks if block.update}
    assert blocks == {"layers[1]": "update[1,2]", "layers[2]": "update[1,2]", "layers[3]": "update[3]"} or (
        blocks == {"layers[1]": "update[1..2]", "layers[2]": "update[1..2]", "layers[3]": "update[3]"}
    )
    check_program(program)


def test_an_update_costs_as_often_as_layers_run_it():
    made = plan()
    one = costs_of(made.program, Workload.of(made.spec, made.program))[UPDATE]
    (sent,) = [sent for _, cost in one.costs for sent in cost.sent]
    assert sent.bytes == pytest.approx(2 * 8 * 8 * 3 / 4)
    assert tally(made.program, made.spec).parameters == tally((other := moe_plan(ep=2)).program, other.spec).parameters


# ---- no gradient -----------------------------------------------------------------------------------------


def test_no_gradient_is_summed_of_a_state_and_one_is_of_a_parameter():
    tokens = Layout.of({"dp": Shard(0)})
    op = Route(operands=("logits", "b"), optional=("bias",), k=2, score="softmax", order="before", normalize=True)
    logits = Value(name="logits", shape=("batch", "sequence", 8), dtype="fp32", layout=tokens)
    placing = Placing((tokens, REPLICATED), (tokens,) * 3)
    state = State(name="b", shape=(8,), dtype="fp32", init=Init(kind="zeros"))
    assert gradient_sums(op, [logits, state], placing) == (frozenset(), frozenset())
    add = MoveBias(operands=("b", "loads"), rate=0.1)
    loads = Value(name="loads", shape=(8,), dtype="int64", layout=Layout.of({"dp": Shard(0)}))
    placing = Placing((REPLICATED, Layout.of({"dp": Shard(0)})), (REPLICATED,))
    assert gradient_sums(add, [BIAS, loads], placing)[0] == frozenset()
    assert not [p.name for b in plan().program.blocks for p in b.parameters if NAME in p.name]


# ---- texts that no pass wrote ------------------------------------------------------------------------------

HOSTILE = {
    "a name with code": (STATE, STATE.replace(NAME, '__import__("os")')),
    "a reserved name": (STATE, STATE.replace(NAME, "moe.train")),
    "a keyword": (STATE, STATE.replace(NAME, "moe.class")),
    "a private name": (STATE, STATE.replace(NAME, "_bias")),
    "a name of 101 characters": (STATE, STATE.replace(NAME, "b" * 101)),
    "a name of a megabyte": (STATE, STATE.replace(NAME, "b" * 1_000_000)),
    "twice": (STATE, f"{STATE} at 11\n    {STATE}"),
    "random values": (STATE, STATE.replace("zeros", "normal(0.02)")),
    "values that are code": (STATE, STATE.replace("zeros", "zeros()")),
    "a symbol for a dim": (STATE, STATE.replace("fp32[8]", "fp32[batch]")),
    "2^62 elements": (STATE, STATE.replace("fp32[8]", f"fp32[{2**31}, {2**31}]")),
    "an unknown dtype": (STATE, STATE.replace("fp32[8]", "fp8[8]")),
    "a layout over no axis": (STATE, STATE.replace("replicate", "zz:shard(0)")),
    "decay": (STATE, f"{STATE} decays"),
    "a sum of its gradient": (STATE, f"{STATE} sum_over(dp)"),
    "no state": (f"    {STATE} at 11\n", ""),
    "another sigil": (f"bias = ^{NAME}", f"bias = @{NAME}"),
    "no sigil": (f"bias = ^{NAME}", f"bias = {NAME}"),
    "a state of nobody": (f"bias = ^{NAME}", "bias = ^moe.other.bias"),
    "two sigils": (f"bias = ^{NAME}", f"bias = ^^{NAME}"),
    "a new value of nobody": (f"state(^{NAME})", "state(^moe.other.bias)"),
    "a new value of a value": (f"state(^{NAME})", "state(%moved)"),
    "a new value that does not end": (f"state(^{NAME})", f"state(^{NAME}"),
    "an updater that is code": (f'updated by "{UPDATE}"', 'updated by "__import__"'),
    "an updater with a long name": (f'updated by "{UPDATE}"', f'updated by "update{"[1]" * 30_000}"'),
    "two updaters": (f'updated by "{UPDATE}"', f'updated by "{UPDATE}" updated by "{UPDATE}"'),
    "an updater before the mesh": (
        f'on "experts[1..2]" updated by "{UPDATE}"', f'updated by "{UPDATE}" on "experts[1..2]"'
    ),
    "a rate of 0": ("rate = 0.01", "rate = 0.0"),
    "an infinite rate": ("rate = 0.01", "rate = 1e999"),
    "a rate that is no number": ("rate = 0.01", "rate = nan"),
}  # fmt: skip


@each_row("fault", HOSTILE)
def test_texts_that_no_pass_wrote_are_refused_within_a_second(fault: str):
    old, new = HOSTILE[fault]
    before, found, after = TEXT.partition(old)
    assert found
    started = time.perf_counter()
    with pytest.raises(IrError) as refused:
        parse_program(before + new + after)
    assert time.perf_counter() - started < SECONDS
    assert len(str(refused.value)) < 400


def test_a_state_that_only_another_block_declares_is_not_defined_here():
    text = re.sub(r"    state .*\n", "", TEXT, count=1)
    with pytest.raises(IrError, match="is not defined here"):
        parse_program(text)


# ---- Programs that break a rule ----------------------------------------------------------------------------


def in_text(old: str, new: str, count: int = 1) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, count)


RETURN = f"return %moved as state(^{NAME})"
WRONG = {
    "nobody updates it": (in_text(f' updated by "{UPDATE}"', ""), f"no block updates |nothing runs the block {UPDATE}"),
    "nobody updates it, and no block could": (
        re.sub(rf'\n  block "{re.escape(UPDATE)}".*?\n  }}\n', "\n", TEXT, flags=re.S)
        .replace(f' updated by "{UPDATE}"', "")
        .replace(f', "{UPDATE}"}}', "}")
        .replace("\n\n\n", "\n\n")
        .replace("  }\n\n  layer", "  }\n  layer"),
        "no block updates \\^moe.gate.bias",
    ),
    "no op reads it": (in_text(f", bias = ^{NAME}", ""), f"no op reads \\^{NAME}"),
    "a layer updates": (in_text(f'updated by "{UPDATE}"', 'updated by "layers[0]"'), "is also a layer"),
    "forward updates": (in_text(f'updated by "{UPDATE}"', 'updated by "forward"'), "forward has other states"),
    "itself updates": (in_text(f'updated by "{UPDATE}"', f'updated by "{BODY}"'), "is also a layer"),
    "no such block": (in_text(f'updated by "{UPDATE}"', 'updated by "update[9]"'), "update.9.|nothing runs"),
    "another type": (in_text(STATE, STATE.replace("fp32[8]", "fp32[16]")), "route .*an fp32 bias for each expert"),
    "bf16": (in_text(STATE, STATE.replace("fp32[8]", "bf16[8]")), "route .*an fp32 bias for each expert"),
    "other initial values": (in_text(STATE, STATE.replace("zeros", "ones")), f"{re.escape(UPDATE)} has other states"),
    "cut over ranks": (in_text(STATE, STATE.replace("replicate", "dp:shard(0)")), "and states are whole"),
    "it gets the old value": (in_text(RETURN, f"return ^{NAME} as state(^{NAME})"), "is not computed alike"),
    "the update is not final": (in_text(f'block "{UPDATE}" final', f'block "{UPDATE}"'), "is not final"),
    "it gets the loads": (in_text(RETURN, f"return %loads.1 as state(^{NAME})"), "no new value of"),
    "it gets one rank's": (
        in_text(f"move_bias ^{NAME}, %loads.1", f"move_bias ^{NAME}, %loads"), "move_bias .*partial"
    ),
    "a new value twice": (in_text(RETURN, f"{RETURN}, %moved as state(^{NAME})"), "two outputs of one role"),
    "a new value of no state": (in_text(RETURN, "return %moved as state"), "gives other outputs than its states"),
    "a number of a layer": (in_text(RETURN, "return %moved as state(1)"), "gives other outputs than its states"),
    "the counts are no counts": (in_text("as counts) at 11", "as labels) at 11"), "has the role labels"),
    "a layer gives a state": (
        in_text("%balance as balance\n", f"%balance as balance, %h as state(^{NAME})\n"), "call gives 4 results"
    ),
    "forward has one": (
        in_text("    parameter @embedding.weight", f"    {STATE} at 11\n    parameter @embedding.weight"), "no op reads"
    ),
    "its name is a parameter's": (TEXT.replace(f"^{NAME}", "^moe.gate.weight"), "the name of a parameter"),
    "its name is part of a parameter's": (TEXT.replace(f"^{NAME}", "^moe.gate"), "is a prefix of another name"),
    "an update of one rank's counts": (
        in_text("8] @ dp:shard(0) as counts)", "8] @ replicate as counts)")
        .replace("%counts : int64[8] @ dp:partial(sum)", "%counts : int64[8] @ replicate")
        .replace("    %loads.1 = all_reduce %loads {axis = dp} : int64[8] @ replicate at 11\n", "")
        .replace("%loads.1", "%loads"),
        "each rank must have its own",
    ),
}  # fmt: skip


@each_row("fault", WRONG)
def test_programs_that_break_a_rule_of_states_are_refused(fault: str):
    text, words = WRONG[fault]
    started = time.perf_counter()
    with pytest.raises(InternalError, match=words):
        check_program(parse_program(text))
    assert time.perf_counter() - started < SECONDS


def test_the_outputs_of_one_update_have_different_keys():
    first, second = (Output("moved", "state", state=name) for name in ("moe.gate.bias", "moe.other.bias"))
    assert first.key != second.key
    assert first.key == replace(first, name="moved.1").key


def test_an_update_with_an_op_beside_is_refused():
    made = plan()
    update = made.program.block(UPDATE)
    gather = AllGather(operands=("moved",), results=(replace(update.scope["moved"], name="y"),), axis="dp", dim=0)
    with pytest.raises(InternalError, match="all_gather"):
        check_program(change_block(made, UPDATE, ops=(*update.ops, gather)).program)


def test_sums_and_biases_fit_each_other():
    rows = Value(name="c", shape=("batch", 8), dtype="int64")
    with pytest.raises(TypeRuleError, match="wants counts"):
        SumSources(operands=("c",)).infer([rows], {})
    loads = Value(name="l", shape=(9,), dtype="int64")
    with pytest.raises(TypeRuleError, match="wants the load of each expert"):
        MoveBias(operands=("b", "l"), rate=0.1).infer([BIAS, loads], {})
