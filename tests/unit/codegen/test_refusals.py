"""A plan is data: planted code is refused and never runs.

`tests/unit/passes/test_hostile_text.py` plants more in the text of a Program alone.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner
from support.plans import moe_plan
from support.tables import each_row

import moec
from moec.cli import app
from moec.codegen.folder import PlanError, canonical, digest
from moec.codegen.plan import FORMAT
from moec.codegen.reading import read_plan

CODE = "__import__('pathlib').Path('planted').touch()"
FILES = ("plan.json", "spec.moe", "program.ir")
Change = Callable[[dict[str, str], dict[str, Any]], None]
"""Edits the texts `spec.moe` and `program.ir`, and what `plan.json` holds beside digests."""


@cache
def files_of_the_plan() -> dict[str, bytes]:
    with TemporaryDirectory() as empty:
        folder = moe_plan().save(Path(empty, "tiny.plan"))
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def renewed(folder: Path) -> Path:
    """The plan again as it was saved, whatever an earlier row did to it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files_of_the_plan().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A plan in an empty folder, where tests look for planted files."""
    monkeypatch.chdir(tmp_path)
    return renewed(tmp_path / "tiny.plan")


def forge(folder: Path, change: Change) -> None:
    """Edits a plan as an attacker would: with new digests."""
    texts = {name: (folder / name).read_text() for name in FILES[1:]}
    manifest = json.loads((folder / "plan.json").read_text())
    change(texts, manifest)
    manifest.pop("digest", None)
    files = {name: text.encode() for name, text in texts.items()}
    manifest["files"] = {name: digest(content) for name, content in files.items()}
    files["plan.json"] = canonical(manifest | {"digest": digest(canonical(manifest))})
    for name, content in files.items():
        (folder / name).write_bytes(content)


def program(old: str, new: str, count: int = 1) -> Change:
    """Replaces the first `old` in the Program."""

    def change(texts: dict[str, str], manifest: dict[str, Any]) -> None:
        assert old in texts["program.ir"], old
        texts["program.ir"] = texts["program.ir"].replace(old, new, count)

    return change


def spec(old: str, new: str) -> Change:
    """Replaces the first `old` in the Spec."""

    def change(texts: dict[str, str], manifest: dict[str, Any]) -> None:
        assert old in texts["spec.moe"], old
        texts["spec.moe"] = texts["spec.moe"].replace(old, new, 1)

    return change


def manifest(**fields: Any) -> Change:
    """Replaces fields of `plan.json`."""
    return lambda texts, manifest: manifest.update(fields)


def test_the_forger_itself_is_believed_when_he_changes_nothing(folder):
    forge(folder, lambda texts, manifest: None)
    read_plan(folder)


THETA = "%q.1 = rope %q {theta = 10000.0}"
ROUTE = "{k = 2, score = softmax, order = before, normalize = true}"
ROWS = "%rows.1 = all_to_all %rows, %splits, %counts.1 {axis = ep, reverse = false}"
NORM = "parameter @attention_norm.weight: fp32[16] @ replicate = ones sum_over(dp)"
QUERY = "parameter @attention.q.weight: fp32[4, 4, 16] @ replicate = normal(0.02) decays sum_over(dp)"
EXPERTS = "parameter @moe.experts.up.weight: fp32[8, 2, 16, 16] @ ep:shard(0) = normal(0.02) decays sum_over(edp)"
SECOND_CALL = '%x.3, %counts_2, %balance_2 = call %x.2 {block = "layers[1..2]", layer = 2}'

PLANTED: dict[str, Change] = {
    "a value's name": program("%h = rms_norm", f"%{CODE} = rms_norm"),
    "a value's name on a new line": program("%h = rms_norm", f"%h\n{CODE} = rms_norm"),
    "an input's name": program("(%x: fp32", f"(%x={CODE}: fp32"),
    "an input's default": program("(%x: fp32[", f"(%x = {CODE}: fp32["),
    "a keyword as a name": program("%h = rms_norm", "%import = rms_norm"),
    "a dunder as a name": program("%h = rms_norm", "%__builtins__ = rms_norm"),
    "an attribute nobody takes": program(THETA, THETA[:-1] + ", dropout = 0.5}"),
    "an attribute twice": program(THETA, THETA[:-1] + ", theta = 10000.0}"),
    "an attribute that is missing": program(" {theta = 10000.0}", ""),
    "an op of torch": program("= rms_norm", "= aten.from_file.default"),
    "an op that prints": program("= rms_norm", "= print"),
    "a Python function": program("= rms_norm", "= os.system"),
    "a builtin": program("= rms_norm", "= eval"),
    "a dunder op": program("= rms_norm", "= __class__"),
    "a parameter's path": program("@attention_norm.weight", f"@weight\n{CODE}", 2),
    "a parameter's path with a dunder": program("@attention_norm.weight", "@__class__.mro", 2),
    "a block that is called": program(SECOND_CALL, SECOND_CALL.replace("layers[1..2]", CODE)),
    "a block that calls itself": program(SECOND_CALL, SECOND_CALL.replace("layers[1..2]", "forward")),
    "a block that comes later": program(SECOND_CALL, SECOND_CALL.replace("layers[1..2]", "loss")),
    "a layer that another call runs": program("layer = 2}", "layer = 1}"),
    "a layer out of order": program("layer = 2}", "layer = 3}"),
    "a word that is code": program("score = softmax", f'score = "{CODE}"'),
    "a word of another op": program("score = softmax", "score = swiglu"),
    "a number that is code": program("{k = 2,", f'{{k = "{CODE}",'),
    "a number below 1": program("{k = 2,", "{k = 0,"),
    "a number of another type": program("{k = 2,", "{k = 2.0,"),
    "a truth value for a number": program("{k = 2,", "{k = true,"),
    "an infinite number": program("theta = 10000.0", "theta = inf"),
    "a number that is none": program("theta = 10000.0", "theta = nan"),
    "a missing operand": program("rms_norm %x, @attention_norm.weight", "rms_norm %x"),
    "an operand too many": program("%q.1 = rope %q {", "%q.1 = rope %q, %k {"),
    "an operand of another shape": program("%q.1 = rope %q {", "%q.1 = rope %h {"),
    "a use before the definition": program("%h = rms_norm %x,", "%h = rms_norm %q,"),
    "two values of one name": program("%k = linear", "%q = linear"),
    "a result of another type": program(f"{THETA} : fp32", f"{THETA} : bf16"),
    "a result of another layout": program(
        f"{THETA} : fp32[batch, sequence, 4, 4] @ dp:shard(0)", f"{THETA} : fp32[batch, sequence, 4, 4] @ replicate"
    ),
    "an axis that is code": program(ROWS, ROWS.replace("axis = ep", f'axis = "{CODE}"')),
    "an axis there is not": program(ROWS, ROWS.replace("axis = ep", "axis = tp")),
    "another axis of the same size": program(ROWS, ROWS.replace("axis = ep", "axis = edp")),
    "rows that go back": program(ROWS, ROWS.replace("reverse = false", "reverse = true")),
    "a layout that is code": program("@ dp:shard(0) as", f"@ {CODE} as"),
    "a role that is code": program("as tokens)", f"as {CODE})"),
    "a role of another input": program("as tokens)", "as labels)"),
    "a role of another output": program("%counts_1 as counts(1)", "%counts_1 as counts(2)"),
    "a layout over no axis": program("@ dp:shard(0) as", "@ tp:shard(0) as"),
    "a span that is code": program(" at 6", f" at {CODE}"),
    "a block's name": program('block "layers[0]"', f'block "x\\n{CODE}"'),
    "a block without its return": program("    return %x.2 as residual\n", ""),
    "a return in the middle": program("    %h = rms_norm", "    return %x as residual\n    %h = rms_norm"),
    "a block that nothing runs": program('block "num_tokens"', 'block "other"'),
    "a block that is gone": program('block "aux_loss"', 'block "other"'),
    "a loss that is not reduced": program("return %loss.1", "return %loss"),
    "a parameter's name": program(NORM, NORM.replace("attention_norm.weight", CODE)),
    "a parameter that no op uses": program(NORM, NORM + "\n    " + NORM.replace("attention_norm", "other_norm")),
    "a parameter twice": program(NORM, f"{NORM}\n    {NORM}"),
    "a parameter's shape": program(NORM, NORM.replace("[16]", "[-1]")),
    "a parameter of no elements": program(NORM, NORM.replace("[16]", "[0]")),
    "a parameter's size": program(NORM, NORM.replace("[16]", f"[{2**62}, {2**62}]")),
    "a parameter's initialiser": program(NORM, NORM.replace("= ones", f"= {CODE}")),
    "a parameter that starts as infinity": program(QUERY, QUERY.replace("normal(0.02)", "normal(1e999)")),
    "a parameter's dtype": program(NORM, NORM.replace("fp32", CODE)),
    "a parameter in int64": program(NORM, NORM.replace("fp32", "int64")),
    "a parameter's order of cuts": program(EXPERTS, EXPERTS.replace("ep:shard(0)", "ep:shard(0) edp:shard(0)")),
    "a parameter that does not divide": program(EXPERTS, EXPERTS.replace("fp32[8", "fp32[7")),
    "a gradient summed over no axis": program(QUERY, QUERY.replace("sum_over(dp)", "sum_over()")),
    "a gradient summed over another axis": program(QUERY, QUERY.replace("sum_over(dp)", "sum_over(cp)")),
    "a gradient summed twice": program(QUERY, QUERY.replace("sum_over(dp)", "sum_over(dp, dp)")),
    "experts' gradients summed over dp": program(EXPERTS, EXPERTS.replace("sum_over(edp)", "sum_over(dp)")),
    "a mesh of another size": program("tp = 1}", "tp = 2}"),
    "a mesh's name": program('mesh "dense"', f'mesh "{CODE}"'),
    "a mesh twice": program('  mesh "experts', '  mesh "dense" {dp = 4}\n  mesh "experts'),
    "a stage there is not": program("  stage 0", "  stage 1"),
    "a stage twice": program("  stage 0", '  stage 0 {"forward"}\n  stage 0'),
    "the tokens' layout": program("tokens @ dp:shard(0)", "tokens @ replicate"),
    "another group": lambda texts, manifest: manifest["groups"].update(dp=[[3, 2, 1, 0]]),
    "a group too many": lambda texts, manifest: manifest["groups"].update(tp=[[0], [1], [2], [3]]),
    "a Spec that is code": lambda texts, manifest: texts.update({"spec.moe": CODE}),
    "a Spec of another model": spec('model "tiny"', 'model "other"'),
    "a Spec that is not canonical": spec("vocab", " vocab"),
    "a Spec that uses a file": lambda texts, manifest: texts.update(
        {"spec.moe": 'use "/etc/passwd.moe"\n' + texts["spec.moe"]}
    ),
    "a Spec that uses the library": lambda texts, manifest: texts.update(
        {"spec.moe": 'use "devices/h100"\n' + texts["spec.moe"]}
    ),
    "a field too many": manifest(hook=CODE),
    "a field too few": lambda texts, manifest: manifest.pop("groups"),
    "a version that is no text": manifest(moec=1),
    "a file that is not the plan's": lambda texts, manifest: texts.update({"stages.py": CODE}),
}  # fmt: skip


@each_row("place", PLANTED)
def test_code_or_nonsense_planted_there_is_refused_and_not_run(folder, place: str):
    forge(renewed(folder), PLANTED[place])
    with pytest.raises(PlanError) as refused:
        read_plan(folder)
    assert refused.value.diagnostics[0].code == "MOE0601"
    assert not Path("planted").exists()


@each_row(
    ("old", "new", "line", "words"),
    [
        ("= rope %q {theta", "= ropes %q {theta", 44, "ropes"),
        ("{theta = 10000.0}", "{thetas = 10000.0}", 44, "thetas"),
        ("{theta = 10000.0}", "{theta = -1.0}", 44, "theta"),
    ],
)
def test_a_wrong_op_or_attribute_is_named_with_its_line(folder, old: str, new: str, line: int, words: str):
    forge(renewed(folder), program(old, new))
    with pytest.raises(PlanError) as refused:
        read_plan(folder)
    message = refused.value.diagnostics[0].message
    assert f"line {line}" in message
    assert words in message


WIDE = ((8, 2), (8, 4), (8, 1))
"""Experts and `ep` of layers 1 to 3 on four ranks: each has a mesh of its own."""

OF_ANOTHER_LAYER: dict[str, tuple[str, str]] = {
    "a block's mesh": ('block "layers[1]" on "experts[1]"', 'block "layers[1]" on "experts[2]"'),
    "no mesh": ('block "layers[1]" on "experts[1]"', 'block "layers[1]"'),
    "a gradient's axis": (
        "@ ep:shard(0) = normal(0.02) decays sum_over(edp)",
        "@ ep:shard(0) = normal(0.02) decays sum_over()",
    ),
    "a parameter's axis": (
        "@ ep:shard(0) = normal(0.02) decays sum_over(edp)",
        "@ replicate = normal(0.02) decays sum_over(edp)",
    ),
}


@each_row("place", OF_ANOTHER_LAYER)
def test_a_block_has_nothing_to_do_with_the_mesh_of_another(tmp_path, place: str):
    folder = moe_plan(ranks=4, ep=4, mixtures=WIDE).save(tmp_path / "tiny.plan")
    forge(folder, lambda texts, manifest: None)
    read_plan(folder)
    forge(folder, program(*OF_ANOTHER_LAYER[place]))
    with pytest.raises(PlanError) as refused:
        read_plan(folder)
    assert refused.value.diagnostics[0].code == "MOE0601"


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_refused(folder, name: str):
    file = folder / name
    content = bytearray(file.read_bytes())
    draw = random.Random(7)
    for _ in range(60):
        position, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
        content[position] ^= bit
        file.write_bytes(content)
        with pytest.raises(PlanError):
            read_plan(folder)
        content[position] ^= bit
    file.write_bytes(content)
    read_plan(folder)


@each_row("name", FILES)
@each_row("share", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused(folder, name: str, share: float):
    content = (renewed(folder) / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(PlanError):
        read_plan(folder)


@each_row("name", FILES)
def test_a_missing_file_is_refused(folder, name: str):
    (renewed(folder) / name).unlink()
    with pytest.raises(PlanError, match="MOE0600" if name == "plan.json" else "MOE0601"):
        read_plan(folder)


@each_row("content", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format": NaN}'])
def test_a_manifest_that_is_something_else_is_refused(folder, content: bytes):
    (folder / "plan.json").write_bytes(content)
    with pytest.raises(PlanError):
        read_plan(folder)


@each_row("other", [FORMAT - 1, FORMAT + 1])
def test_a_plan_of_another_format_names_the_command_that_compiles_it_again(folder, other: int):
    forge(renewed(folder), manifest(format=other))
    with pytest.raises(PlanError, match=rf"MOE0602.*format {other}, this moec reads format {FORMAT}") as refused:
        read_plan(folder)
    (diagnostic,) = refused.value.diagnostics
    program, *arguments = shlex.split(str(diagnostic.help).split("`")[1])
    assert (program, CliRunner().invoke(app, arguments).exit_code) == ("moec", 0)
    assert read_plan(folder).program == moe_plan().program


def test_a_plan_of_a_former_format_says_to_compile_again(folder):
    """Format 1 kept FX graphs in `stages/0.json`, and the Spec in `plan.json`."""
    old = {"format": 1, "moec": "0.1.0", "name": "tiny", "spec": "", "meshes": [], "num_stages": 1, "files": {}}
    (folder / "plan.json").write_bytes(canonical(old | {"digest": digest(canonical(old))}))
    (folder / "spec.moe").unlink()
    with pytest.raises(PlanError) as refused:
        read_plan(folder)
    (diagnostic,) = refused.value.diagnostics
    assert (diagnostic.code, f"format 1, this moec reads format {FORMAT}" in diagnostic.message) == ("MOE0602", True)
    assert "compile the .moe file again" in str(diagnostic.help)


def test_a_linked_file_is_refused(folder, tmp_path):
    (folder / "program.ir").rename(tmp_path / "elsewhere.ir")
    (folder / "program.ir").symlink_to(tmp_path / "elsewhere.ir")
    with pytest.raises(PlanError, match="link"):
        read_plan(folder)


@each_row("name", FILES)
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(folder, name):
    (renewed(folder) / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(PlanError, match="MOE060"):
        read_plan(folder)


def test_a_huge_file_is_refused_unread(folder, monkeypatch):
    monkeypatch.setattr("moec.codegen.reading.MAX_FILE_BYTES", 1000)
    with pytest.raises(PlanError, match="larger than 1000 bytes"):
        read_plan(folder)


@each_row(
    ("old", "new", "name"),
    [
        ("normal(0.02) decays", "normal(0.02)", "layers.0.attention.q.weight"),
        ("normal(0.02) decays", "normal(0.03) decays", "layers.0.attention.q.weight"),
        ("= ones", "= zeros", "layers.0.attention_norm.weight"),
        ("= ones", "= ones decays", "layers.0.attention_norm.weight"),
    ],
)
def test_initial_values_and_weight_decay_are_those_of_the_spec(folder, old: str, new: str, name: str):
    """No rule of an op, and no comparison of gradients, would find another."""
    forge(renewed(folder), program(old, new))
    with pytest.raises(PlanError, match=f"program.ir: its parameter {name} is not that of the Spec"):
        read_plan(folder)


@each_row(
    ("old", "new"),
    [
        (
            "parts = 4, whole = 5, eval_parts = 4, eval_whole = 5",
            "parts = 17, whole = 20, eval_parts = 17, eval_whole = 20",
        ),
        ("least = 1", "least = 4"),
    ],
)
def test_capacities_are_those_of_the_spec(tmp_path, old: str, new: str):
    """On the short sequences of `moec verify` an expert has as many places."""
    folder = moe_plan(beside="capacity = factor(0.8)").save(tmp_path / "capacity.plan")
    forge(folder, program(old, new, -1))
    with pytest.raises(PlanError, match=r"its capacity of layer 1 is not that of the Spec"):
        read_plan(folder)


def test_the_order_of_parameters_is_that_of_the_spec(folder):
    """An optimizer's state is by order."""
    lines = (folder / "program.ir").read_text().splitlines(keepends=True)
    first, second = (next(i for i, line in enumerate(lines) if f"@attention.{n}.weight:" in line) for n in "qk")
    lines[first], lines[second] = lines[second], lines[first]
    forge(folder, lambda texts, manifest: texts.update({"program.ir": "".join(lines)}))
    with pytest.raises(PlanError, match="its order of the parameters of layer 0 is not that of the Spec"):
        read_plan(folder)


@each_row(
    ("old", "new"),
    [
        ("fp32[8] @ replicate = zeros", "fp32[8] @ replicate = ones"),
        ("^moe.gate.bias", "^moe.gate.biases"),
    ],
)
def test_states_are_those_of_the_spec(tmp_path, old: str, new: str):
    """The Program keeps every rule: the layers and the block that updates their states are edited alike."""
    plan = moe_plan(gate="topk(2, score = sigmoid, normalize = true, bias = online(0.01))")
    folder = plan.save(tmp_path / "online.plan")
    forge(folder, program(old, new, count=-1))
    with pytest.raises(PlanError, match=r"program.ir: its state layers.[12].moe.gate.bias\w* is not that of"):
        read_plan(folder)


def test_trust_nothing_compares_with_a_fresh_compilation(folder):
    assert moec.load(folder, trust_nothing=True).name == "tiny"
    forge(folder, program(THETA, THETA.replace("10000.0", "20000.0")))
    moec.load(folder)
    with pytest.raises(PlanError, match=r"program.ir: compiling the Spec inside the plan gives another Program"):
        moec.load(folder, trust_nothing=True)
