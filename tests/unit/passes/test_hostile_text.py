"""Hostile texts of Programs: everything that no pass wrote is refused, with its line."""

from __future__ import annotations

import keyword
import re
import subprocess
import sys
import time

import pytest
from support.plans import moe_spec
from support.tables import each_row

from moec.grammar.diagnostics import InternalError
from moec.passes.ir import IrError
from moec.passes.ir.limits import MODULE_ATTRIBUTES, is_name
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.passes.pipeline import compile_program

TEXT = print_program(compile_program(moe_spec(depth=2)).program)
EMBED = "%x = embed %tokens, @embedding.weight"
IMPORT = '__import__("os")'
NO_SOURCE = TEXT.replace(' from "tiny.moe"', "")
SECONDS = 1.0
"""Far more seconds than a refusal takes."""


def planted(old: str, new: str) -> tuple[str, int]:
    """TEXT with the first `old` replaced by `new`, and the line of `old`."""
    before, found, after = TEXT.partition(old)
    assert found, old
    return before + new + after, before.count("\n") + 1


PLANTED = {
    "a call of the block itself": (EMBED, '%x = call %tokens {block = "forward", layer = 0}'),
    "a call of a later block": (EMBED, '%x = call %tokens {block = "loss", layer = 0}'),
    "a call of no block": ('{block = "layers[0]", layer = 0}', '{block = "layers[9]", layer = 0}'),
    "a call of layer −1": ("layer = 0}", "layer = -1}"),
    "an infinite deviation": ("normal(0.02)", "normal(1e999)"),
    "a deviation that is no number": ("normal(0.02)", "normal(nan)"),
    "a negative deviation": ("normal(0.02)", "normal(-0.02)"),
    "an infinite attribute": ("eps = 1e-05", "eps = 1e999"),
    "an attribute that is inf": ("eps = 1e-05", "eps = inf"),
    "an attribute below its bound": ("eps = 1e-05", "eps = 0.0"),
    "an attribute of another form": ("eps = 1e-05", "eps = 0.00001"),
    "an int for a float": ("theta = 10000.0", "theta = 10000"),
    "a bool for an int": ("k = 2,", "k = true,"),
    "a float for an int": ("k = 2,", "k = 2.0,"),
    "an int for a bool": ("normalize = true", "normalize = 1"),
    "a word for a number": ("k = 2,", "k = two,"),
    "a list for a word": ("kind = gelu", "kind = [gelu]"),
    "an unknown word": ("score = softmax", "score = softplus"),
    "an unknown activation": ("kind = gelu", "kind = tanh"),
    "an int of 20 digits": ("k = 2,", f"k = {10**19},"),
    "an int of 100,000 digits": ("k = 2,", f"k = {'9' * 100_000},"),
    "a k of 0": ("k = 2,", "k = 0,"),
    "an unknown attribute": ("{eps = 1e-05}", "{eps = 1e-05, axis = dp}"),
    "a misspelt attribute": ("{eps = 1e-05}", "{epz = 1e-05}"),
    "an attribute twice": ("{eps = 1e-05}", "{eps = 1e-05, eps = 1e-05}"),
    "no attribute": (" {eps = 1e-05}", ""),
    "empty braces": ("{eps = 1e-05}", "{}"),
    "attributes in another order": ("{k = 2, score = softmax,", "{score = softmax, k = 2,"),
    "an unknown op": ("= rms_norm", "= rms_norn"),
    "a private method as an op": ("= rms_norm", "= __init__"),
    "lists inside one another": ("[0.01, 0.001]", "[" * 10_000 + "]" * 10_000),
    "a list that does not end": ("[0.01, 0.001]", "[0.01, 0.001"),
    "braces that do not end": ("{eps = 1e-05}", "{eps = 1e-05"),
    "a dim of 0": ("fp32[16]", "fp32[0]"),
    "a negative dim": ("fp32[16]", "fp32[-16]"),
    "a dim above 2^31": ("fp32[16]", f"fp32[{2**31 + 1}]"),
    "2^62 elements": ("fp32[16]", f"fp32[{2**31}, {2**31}]"),
    "nine dims": ("fp32[16]", f"fp32[{', '.join(['1'] * 9)}]"),
    "an unknown dim": ("fp32[batch,", "fp32[batches,"),
    "rows that nothing counts": ("rows by %counts,", "rows by %nothing,"),
    "a dim of a parameter without a size": ("fp32[16]", "fp32[batch]"),
    "a leading zero": ("fp32[16]", "fp32[016]"),
    "look-alike digits": ("fp32[16]", "fp32[١٦]"),
    "full-width digits": ("k = 2,", "k = \uff12,"),
    "an unknown dtype": ("fp32[16]", "fp8[16]"),
    "a dim that is not there": ("@ ep:shard(0)", "@ ep:shard(4)"),
    "a layout over no axis": ("@ ep:shard(0)", "@ xp:shard(0)"),
    "a layout twice over an axis": ("@ ep:shard(0)", "@ ep:shard(0) ep:shard(1)"),
    "an unknown reduction": ("partial(sum)", "partial(min)"),
    "a mesh of 4,000 digits": ("dp = 4", f"dp = {'4' * 4_000}"),
    "a mesh of 2^21 ranks": ("dp = 4", f"dp = {2**21}"),
    "axes of 2^40 ranks": ("dp = 4, cp = 1", f"dp = {2**20}, cp = {2**20}"),
    "an axis of 0": ("dp = 4", "dp = 0"),
    "an axis twice": ("dp = 4, cp = 1", "dp = 4, dp = 1"),
    "65 axes": ("dp = 4", "".join(f"a{chr(97 + i // 26)}{chr(97 + i % 26)} = 1, " for i in range(65)) + "dp = 4"),
    "an axis with a long name": ("cp = 1", "cccccccccccc = 1"),
    "a mesh twice": ('mesh "experts[1]"', 'mesh "dense"'),
    "a block on no mesh": ('on "experts[1]"', 'on "experts[2]"'),
    "a block twice": ('block "layers[1]" on', 'block "layers[0]" on'),
    "a parameter twice": ("@attention.k.weight: fp32", "@attention.q.weight: fp32"),
    "a value twice": ("%k = linear", "%q = linear"),
    "an input again": ("%h = rms_norm", "%x = rms_norm"),
    "a parameter of another block": ("@ffn.up.weight :", "@moe.gate.weight :"),
    "a value of another block": ("%y = linear %active", "%y = linear %logits"),
    "a value before its definition": ("%q = linear %h", "%q = linear %h.1"),
    "an output that is not defined": ("return %x.2 as", "return %x.3 as"),
    "an unknown role of an input": ("as tokens)", "as token)"),
    "an unknown role of an output": ("%logits as logits", "%logits as logit"),
    "an input without a role": (" as tokens)", ")"),
    "an output without a role": ("%logits as logits", "%logits"),
    "a role that is code": ("as tokens)", f"as {IMPORT})"),
    "two roles": ("as tokens)", "as tokens as tokens)"),
    "an input of a layer's number": ("as tokens)", "as tokens(1))"),
    "a layer that is no number": ("as counts(1)", "as counts(one)"),
    "a layer −1": ("as counts(1)", "as counts(-1)"),
    "a layer of 20 digits": ("as counts(1)", f"as counts({10**19})"),
    "a layer 01": ("as counts(1)", "as counts(01)"),
    "a layer with no number": ("as counts(1)", "as counts()"),
    "a comma after the outputs": ("as counts(1)", "as counts(1), "),
    "an output that is no name": ("return %logits", "return %lo gits"),
    "a stage of no block": ('runs "forward"', 'runs "backward"'),
    "a stage of other ranks": ("on ranks 0..3", "on ranks 1..4"),
    "a second stage first": ("stage 0", "stage 1"),
    "a NUL byte": ("rms_norm", "rms_norm\0"),
    "a tab": ("rms_norm %x", "rms_norm\t%x"),
    "a carriage return": ("at 6", "at 6\r"),
    "an escape": ('program "tiny"', 'program "\\u001b[2J"'),
    "half a character": ('program "tiny"', 'program "\\ud800"'),
    "a string that does not end": ('from "tiny.moe"', 'from "tiny.moe'),
    "a line number of 30 digits": ("at 6", f"at {'6' * 30}"),
    "a line 0": ("at 6", "at 0"),
    "the main source named again": (" at 6", ' at "tiny.moe" 6'),
    "another main source than most ops name": ('from "tiny.moe"', 'from "tiny.moe" from "tiny.moe"'),
    "a comment": ("at 6", "at 6 # why"),
    "two spaces": ("%h = rms_norm", "%h  = rms_norm"),
    "a line of 2 MB": ("%h = rms_norm", "%" + "h" * 2_000_000 + " = rms_norm"),
    "a type too many": (": fp32[batch, sequence, 16] @", ": fp32[], fp32[batch, sequence, 16] @"),
    "a comma after the types": ("dp:shard(0) at 6\n    %q", "dp:shard(0),  at 6\n    %q"),
}  # fmt: skip
WORDS = [
    "fp32[16]", "16]", "rms_norm", "gelu}", "eps =", "ones", "sum_over(dp)", "dp = 4", "ep:shard",
    "@attention_norm.weight:", "%h =", '"layers[0]" (', '"experts[1]"', "rows by %counts", "decays", "@ replicate",
    "stage 0", "mesh", "1e-05", "final", "return", "tokens @", "at 6", "on ranks 0..3",
]  # fmt: skip
"""The places of words."""
BAD_NAMES = [
    "class",
    "None",
    "x.if",
    "forward",
    "x.train",
    "_x",
    "x._apply",
    "X",
    "x..y",
    ".x",
    "x.",
    "x" * 101,
    "x-y",
    "",
]


@each_row("fault", PLANTED)
def test_what_no_pass_wrote_is_refused_with_its_line(fault: str):
    text, line = planted(*PLANTED[fault])
    started = time.perf_counter()
    with pytest.raises(IrError) as refused:
        parse_program(text)
    assert time.perf_counter() - started < SECONDS
    assert refused.value.line == line, refused.value
    assert str(refused.value).startswith(f"line {line}: ")
    assert len(str(refused.value)) < 300


@each_row("word", WORDS)
def test_code_where_a_word_may_stand_is_refused(word: str):
    text, line = planted(word, re.sub(r"\w+", lambda _: IMPORT, word, count=1))
    with pytest.raises(IrError) as refused:
        parse_program(text)
    # A name that is used before it is misspelt is refused where it is used: blocks of meshes, meshes of layouts.
    assert refused.value.line >= line or "axis" in str(refused.value)


@each_row("name", BAD_NAMES)
@each_row("old", ["%{} = rms_norm|%h = rms_norm", "@{}: fp32[16]|@attention_norm.weight: fp32[16]"])
def test_names_that_would_replace_something_are_refused(name: str, old: str):
    new, _, old = old.partition("|")
    text, line = planted(old, new.format(name))
    with pytest.raises(IrError) as refused:
        parse_program(text)
    assert refused.value.line == line


def test_reserved_names_are_those_of_python_and_of_torch():
    # Other libraries hang attributes of their own on torch's class.
    code = "import torch; print(*dir(torch.nn.Module()))"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert len(names) > 60
    for name in names:
        assert not is_name(name), name
        assert name in MODULE_ATTRIBUTES or not name.islower() or name.startswith("_")
    assert not any(is_name(word) for word in keyword.kwlist)
    assert is_name("moe.experts.up.weight")
    assert is_name("k.1_copies")


@each_row(
    "text",
    [
        "", "\n", "}", TEXT + "\n", TEXT + "x\n", TEXT + TEXT, TEXT[:-1], TEXT.replace("\n", "\r\n"), "\ufeff" + TEXT,
        " " + TEXT, NO_SOURCE,
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str):
    with pytest.raises(IrError):
        parse_program(text)


def test_a_text_cut_after_any_line_is_refused_there():
    lines = TEXT.splitlines(keepends=True)
    for count in range(len(lines)):
        with pytest.raises(IrError) as refused:
            parse_program("".join(lines[:count]))
        assert refused.value.line == count


def test_a_line_left_out_or_repeated_is_refused():
    lines = TEXT.splitlines(keepends=True)
    for at in range(len(lines)):
        for changed in (lines[:at] + lines[at + 1 :], lines[: at + 1] + lines[at:]):
            with pytest.raises((IrError, InternalError)):
                check_program(parse_program("".join(changed)))


def test_an_unknown_word_is_answered_with_the_nearest_one():
    for old, new, meant in (
        ("= rms_norm", "= rms_nrm", "'rms_norm'"),
        ("{eps", "{epz", "'eps'"),
        ("as tokens)", "as token)", "'tokens'"),
    ):
        with pytest.raises(IrError, match=f"did you mean {meant}"):
            parse_program(planted(old, new)[0])
