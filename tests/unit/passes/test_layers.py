"""Layers and their bodies in a plan's text: they read back, and a layer without its body is refused at its line."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.plans import moe_spec
from support.tables import each_row

from moec.codegen.plan import parameters_of
from moec.grammar.diagnostics import InternalError
from moec.passes.ir import IrError, Layer, Program
from moec.passes.ir.ops import Call
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.pipeline import compile_program

PROGRAM = compile_program(moe_spec(depth=4, gate="topk(2, bias = online(0.01))")).program
TEXT = print_program(PROGRAM)
DENSE, BODY = '  layer 0 of "layers[0]"\n', '  layers 1..3 of "layers[1..3]"\n'


def test_layers_of_one_body_are_a_line_and_read_back():
    assert re.findall(r"  layers? .*\n", TEXT) == [DENSE, BODY]
    assert parse_program(TEXT).layers == tuple(Layer(n, (f"layers[{'1..3' if n else 0}]",)) for n in range(4))


def test_layers_that_alternate_read_back():
    program = compile_program(moe_spec(mixtures=((8, 2), (16, 2), (8, 2)))).program
    text = print_program(program)
    numbers = ("0", "1..3 step 2", "2", "1..3 step 2")
    lines = [f'  layer {n} of "layers[{of}]"' for n, of in enumerate(numbers)]
    assert re.findall(r"  layers? .*", text) == lines
    assert parse_program(text) == program


def test_parameters_and_states_are_each_layers_own():
    for layer in PROGRAM.layers:
        body = PROGRAM.body(layer)
        names = {f"layers.{layer.number}.{p.name}" for p in body.parameters}
        assert names == {name for name in parameters_of(PROGRAM) if name.startswith(layer.prefix)}
    assert list(PROGRAM.states) == [f"layers.{n}.moe.gate.bias" for n in (1, 2, 3)]


WRONG = {
    "no body": (BODY, "  layers 1..3 of \n", "their body is wanted"),
    "no layers": (DENSE + BODY, "", "layer 0 has no body"),
    "layers that are missing at the end": (BODY, "", "layer 1 has no body"),
    "the last layer is missing": ("1..3 of", "1..2 of", "layer 3 has no body"),
    "the first layer is missing": (DENSE, "", "layer 0 is the next, not 1"),
    "a layer twice": (BODY, DENSE + BODY, "layer 1 is the next, not 0"),
    "a layer in two lines": ("1..3 of", "0..3 of", "layer 1 is the next, not 0"),
    "a layer too many": ("1..3 of", "1..4 of", "runs layer 4 by no block"),
    "a million layers": ("1..3 of", "1..999999 of", "runs layer 4 by no block"),
    "a layer that no Program has": ("1..3 of", "1..9999999 of", "number of a layer"),
    "layers that go back": ("1..3 of", "1..0 of", "number of a layer"),
    "two lines for one body": (
        BODY, '  layers 1..2 of "layers[1..3]"\n  layer 3 of "layers[1..3]"\n', "not as `print_program` prints"
    ),
    "a body that there is not": ('of "layers[0]"', 'of "layers[5]"', "there is no block 'layers.5.'"),
    "another layer's body": ('of "layers[0]"', 'of "layers[1..3]"', r"layer 0 by 'layers.0.', which is no body"),
    "a body that is no layer's block": ('of "layers[0]"', 'of "loss"', "layer 0 by 'layers.0.', which is no body"),
    "two bodies": ('of "layers[0]"', 'of "layers[0]", "layers[1..3]"', "several bodies are not supported yet"),
}  # fmt: skip


@each_row("fault", WRONG)
def test_wrong_layers_are_refused_at_their_line(fault: str):
    old, new, words = WRONG[fault]
    start = TEXT.index(DENSE)
    assert old in TEXT[start:]
    with pytest.raises(IrError, match=words) as refused:
        parse_program(TEXT[:start] + TEXT[start:].replace(old, new, 1))
    first = TEXT.count("\n", 0, start) + 1
    assert first - 1 <= refused.value.line <= first + 2


CALL = 'call %x.1 {block = "layers[1..3]", layer = 1}'


@each_row(("new", "words"), [
    (CALL.replace("1..3", "0"), "layer 1 by 'layers.0.', which is no body of it"),
    (CALL.replace("layer = 1", "layer = 0"), "layer 0 runs twice"),
    (CALL.replace("layer = 1", "layer = 7"), "layer 1 by no block"),
])  # fmt: skip
def test_a_call_of_another_body_is_refused(new: str, words: str):
    assert CALL in TEXT
    with pytest.raises(IrError, match=words):
        parse_program(TEXT.replace(CALL, new))


def test_a_body_that_no_layer_names_is_refused():
    start = TEXT.index('  block "layers[0]"')
    block = TEXT[start : TEXT.index("\n\n", start)]
    with pytest.raises(IrError, match="'spare' is the body of no layer"):
        parse_program(TEXT.replace(block, f"{block}\n\n{block.replace('layers[0]', 'spare')}"))


def changed(old: Program, calls: dict[int, int]) -> Program:
    """The Program whose `forward` runs other layers."""

    def renumbered(op):
        return replace(op, layer=calls.get(op.layer, op.layer)) if isinstance(op, Call) else op

    blocks = (replace(block, ops=tuple(map(renumbered, block.ops))) for block in old.blocks)
    return replace(old, blocks=tuple(blocks))


@each_row(("program", "words"), [
    (changed(PROGRAM, {1: 0}), "layer 0 runs twice"),
    (changed(PROGRAM, {1: 2, 2: 1}), "once each, in order"),
    (replace(PROGRAM, layers=()), "once each, in order"),
    (replace(PROGRAM, layers=(Layer(0, ("layers[0]", "layers[1..3]")), *PROGRAM.layers[1:])), "is not the one body"),
    (replace(PROGRAM, layers=(Layer(0, ("layers[1..3]",)), *PROGRAM.layers[1:])), "is not the one body of layer 0"),
])  # fmt: skip
def test_a_program_that_a_pass_made_wrong_is_refused(program: Program, words: str):
    with pytest.raises(InternalError, match=words):
        check_program(program)
