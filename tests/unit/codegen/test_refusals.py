"""A plan is data: whatever is planted in one, it is refused, and nothing of it runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import moe_plan

from moec.codegen.folder import PlanError, canonical, digest
from moec.codegen.fx import GraphError, build_module
from moec.codegen.graph import Node
from moec.codegen.plan import FORMAT
from moec.codegen.python import python_text
from moec.codegen.reading import read_plan

CODE = "__import__('pathlib').Path('planted').touch()"
Json = Any


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A plan on disk, in a folder of its own to watch for planted files."""
    monkeypatch.chdir(tmp_path)
    return moe_plan().save(tmp_path / "tiny.plan")


def forge(folder: Path, change: Callable[[Json, Json], None]) -> None:
    """Edits a plan as an attacker would: the digests are made to fit again."""
    from moec.codegen.graph import StageGraphs

    manifest = json.loads((folder / "plan.json").read_bytes())
    stage = json.loads((folder / "stages/0.json").read_bytes())
    change(manifest, stage)
    files = {"stages/0.json": canonical(stage)}
    try:
        files["stages/0.py"] = python_text(StageGraphs.model_validate_json(files["stages/0.json"])).encode()
    except ValueError:
        files["stages/0.py"] = (folder / "stages/0.py").read_bytes()
    manifest.pop("digest")
    manifest["files"] = {name: digest(content) for name, content in files.items()}
    files["plan.json"] = canonical(manifest | {"digest": digest(canonical(manifest))})
    for name, content in files.items():
        (folder / name).write_bytes(content)


def nodes(stage: Json, graph: str = "layers[1..2]") -> list[Json]:
    return next(g for g in stage["graphs"] if g["name"] == graph)["nodes"]


def node(stage: Json, name: str, graph: str = "layers[1..2]") -> Json:
    return next(n for n in nodes(stage, graph) if n["name"] == name)


def send_over(stage: Json, group: str) -> None:
    """Rows, over another group."""
    node(stage, "rows_1").update(args=[{"node": "rows"}, {"node": "splits"}, group, False])


def test_the_forger_itself_is_believed_when_he_changes_nothing(folder):
    forge(folder, lambda manifest, stage: None)
    read_plan(folder)


PLANTED: dict[str, Callable[[Json, Json], Any]] = {
    "a node's name": lambda m, s: node(s, "h").update(name=CODE),
    "a node's name on a new line": lambda m, s: node(s, "h").update(name=f"h\n{CODE}"),
    "a placeholder's name": lambda m, s: nodes(s)[0].update(name=f"x={CODE}", target=f"x={CODE}"),
    "a placeholder's target": lambda m, s: nodes(s)[0].update(target=f"x, y={CODE}"),
    "a placeholder's default": lambda m, s: nodes(s)[0].update(args=[CODE]),
    "a keyword as a name": lambda m, s: node(s, "h").update(name="import"),
    "a dunder as a name": lambda m, s: node(s, "h").update(name="__builtins__"),
    "a keyword argument's name": lambda m, s: node(s, "attended_heads").update(kwargs={f"scale={CODE}, x": True}),
    "a keyword argument nobody takes": lambda m, s: node(s, "attended_heads").update(kwargs={"dropout": 0.5}),
    "a keyword argument twice": lambda m, s: node(s, "attended_heads").update(kwargs={"query": {"node": "q"}}),
    "an operator of another kind": lambda m, s: node(s, "h").update(target="aten.from_file.default"),
    "an operator that prints": lambda m, s: node(s, "h").update(target="aten._print.default"),
    "a random operator": lambda m, s: node(s, "h").update(target="aten.bernoulli_.float"),
    "a Python function": lambda m, s: node(s, "h").update(target="os.system"),
    "a builtin": lambda m, s: node(s, "h").update(target="eval"),
    "a dunder operator": lambda m, s: node(s, "h").update(target="aten.__class__.default"),
    "an overload that is a method": lambda m, s: node(s, "h").update(target="aten.linear.__init__"),
    "a method call": lambda m, s: node(s, "h").update(op="call_method", target="backward"),
    "a parameter's path": lambda m, s: node(s, "attention_norm_weight").update(target=f"weight\n{CODE}"),
    "a parameter's path with a dunder": lambda m, s: node(s, "attention_norm_weight").update(target="__class__.mro"),
    "a module's path": lambda m, s: node(s, "weighted").update(target=f"moe.experts();{CODE};self.moe"),
    "a module's graph": lambda m, s: node(s, "weighted").update(graph="forward"),
    "a graph that calls itself": lambda m, s: node(s, "weighted").update(graph="layers[1..2]"),
    "a constant that is code": lambda m, s: node(s, "p_all")["args"].__setitem__(2, CODE),
    "a number that is code": lambda m, s: node(s, "p_all")["args"].__setitem__(1, CODE),
    "a constant string of quotes": lambda m, s: node(s, "splits").update(args=[f"'+{CODE}+'", 1]),
    "a constant that is an object": lambda m, s: node(s, "h").update(args=[{"eval": CODE}]),
    "a constant that is infinite": lambda m, s: node(s, "q_1").update(args=[{"node": "q"}, "inf"]),
    "a dtype that is code": lambda m, s: node(s, "h").update(args=[{"dtype": CODE}]),
    "an item that is no number": lambda m, s: node(s, "w").update(args=[{"node": "p_all"}, CODE]),
    "an item with a keyword": lambda m, s: node(s, "w").update(kwargs={"key": 1}),
    "a missing argument": lambda m, s: node(s, "h").update(args=[{"node": "x"}]),
    "too many arguments": lambda m, s: node(s, "q_1").update(args=[{"node": "q"}, 1.0, 2.0]),
    "an unknown field": lambda m, s: node(s, "h").update(meta=CODE),
    "a group that is code": lambda m, s: send_over(s, CODE),
    "a group there is not": lambda m, s: send_over(s, "ep[9]"),
    "a layout that is code": lambda m, s: node(s, "h").update(layout=CODE),
    "a layout over no axis": lambda m, s: node(s, "h").update(layout="tp:shard(0)"),
    "a value that is code": lambda m, s: node(s, "h").update(value=CODE),
    "a graph's name": lambda m, s: s["graphs"][0].update(name=f"x\n{CODE}"),
    "two nodes of one name": lambda m, s: node(s, "k").update(name="q"),
    "a use before the definition": lambda m, s: node(s, "h").update(args=[{"node": "q"}]),
    "a graph without an output": lambda m, s: nodes(s).pop(),
    "an output in the middle": lambda m, s: nodes(s).insert(1, nodes(s).pop()),
    "an empty graph": lambda m, s: nodes(s).clear(),
    "a stage that is a list": lambda m, s: s.update(graphs=[[]]),
    "a parameter's name": lambda m, s: m["bodies"][0]["parameters"][0].update(name=CODE),
    "a parameter that no graph uses": lambda m, s: m["bodies"][0]["parameters"][0].update(name="other.weight"),
    "a parameter's shape": lambda m, s: m["bodies"][0]["parameters"][0].update(shape=[-1]),
    "a parameter's size": lambda m, s: m["bodies"][0]["parameters"][0].update(shape=[2**62, 2**62]),
    "a parameter's initialiser": lambda m, s: m["bodies"][0]["parameters"][0].update(init=CODE),
    "a parameter's dtype": lambda m, s: m["bodies"][0]["parameters"][0].update(dtype=CODE),
    "a parameter in fp16": lambda m, s: m["bodies"][0]["parameters"][0].update(dtype="fp16"),
    "a parameter's mesh": lambda m, s: m["bodies"][0]["parameters"][0].update(mesh="nowhere"),
    "a gradient's group": lambda m, s: m["bodies"][0]["parameters"][0].update(sum_over=["pp"]),
    "layers of one number": lambda m, s: m["bodies"][2].update(layers=[0, 1]),
    "another group": lambda m, s: m["groups"].update(dp=[[3, 2, 1, 0]]),
    "a mesh of another size": lambda m, s: m["meshes"][0]["axes"].append(["cp", 2]),
    "a mesh's name": lambda m, s: m["meshes"][0].update(name=CODE),
    "a spec that is code": lambda m, s: m.update(spec=CODE),
    "a stage there is not": lambda m, s: m.update(num_stages=2),
    "a field too many": lambda m, s: m.update(hook=CODE),
    "a field too few": lambda m, s: m.pop("spec"),
    "a version of another type": lambda m, s: m.update(num_stages=True),
}  # fmt: skip


@pytest.mark.parametrize("place", PLANTED)
def test_code_or_nonsense_planted_there_is_refused_and_not_run(folder, place: str):
    forge(folder, PLANTED[place])
    with pytest.raises(PlanError) as refused:
        read_plan(folder)
    assert refused.value.diagnostics[0].code == "MOE0601"
    assert not Path("planted").exists()


def body(manifest: Json, layer: int) -> Json:
    return next(b for b in manifest["bodies"] if b["layers"] == [layer])


def weight(manifest: Json, layer: int) -> Json:
    return next(p for p in body(manifest, layer)["parameters"] if p["name"] == "moe.experts.up.weight")


OF_ANOTHER_LAYER: dict[str, Callable[[Json, Json], Any]] = {
    "a collective's group": lambda m, s: node(s, "rows_1", "layers[1]").update(
        args=[{"node": "rows"}, {"node": "splits"}, "ep[2]", False]
    ),
    "a gradient's group": lambda m, s: weight(m, 1).update(sum_over=["edp[3]"]),
    "a parameter's mesh": lambda m, s: weight(m, 1).update(mesh="experts[2]"),
    "a body's mesh": lambda m, s: body(m, 1).update(experts="experts[2]"),
    "a parameter's axis": lambda m, s: weight(m, 3).update(layout="ep:shard(0)"),
}


@pytest.mark.parametrize("place", OF_ANOTHER_LAYER)
def test_a_body_has_nothing_to_do_with_the_mesh_of_another(tmp_path, place: str):
    folder = moe_plan(ranks=4, ep=4, mixtures=((8, 2), (8, 4), (8, 1))).save(tmp_path / "tiny.plan")
    forge(folder, lambda manifest, stage: None)
    read_plan(folder)
    forge(folder, OF_ANOTHER_LAYER[place])
    with pytest.raises(PlanError) as refused:
        read_plan(folder)
    assert refused.value.diagnostics[0].code == "MOE0601"


def test_operators_are_resolved_from_the_allow_list_alone():
    stage = moe_plan().stages[0]
    planted = stage.model_copy(
        update={
            "graphs": (
                stage.graphs[0].model_copy(
                    update={
                        "nodes": (Node(name="h", op="call_function", target="aten.from_file.default", args=(CODE,)),)
                    }
                ),
            )
        }
    )
    with pytest.raises(GraphError, match="which plans may not"):
        build_module(planted, stage.graphs[0].name, lambda name: pytest.fail("no parameter is made"))


@pytest.mark.parametrize("name", ["plan.json", "stages/0.json", "stages/0.py"])
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


@pytest.mark.parametrize("name", ["plan.json", "stages/0.json", "stages/0.py"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused(folder, name: str, share: float):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(PlanError):
        read_plan(folder)


@pytest.mark.parametrize("name", ["plan.json", "stages/0.json", "stages/0.py"])
def test_a_missing_file_is_refused(folder, name: str):
    (folder / name).unlink()
    with pytest.raises(PlanError, match="MOE0600" if name == "plan.json" else "MOE0601"):
        read_plan(folder)


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format": NaN}'])
def test_a_manifest_that_is_something_else_is_refused(folder, content: bytes):
    (folder / "plan.json").write_bytes(content)
    with pytest.raises(PlanError):
        read_plan(folder)


def test_a_newer_format_is_refused_by_its_name(folder):
    forge(folder, lambda manifest, stage: manifest.update(format=FORMAT + 1))
    with pytest.raises(PlanError, match=r"MOE0602.*format 2, this moec reads 1"):
        read_plan(folder)


def test_a_linked_file_is_refused(folder, tmp_path):
    (folder / "stages/0.py").rename(tmp_path / "elsewhere.py")
    (folder / "stages/0.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(PlanError, match="link"):
        read_plan(folder)


def test_a_huge_file_is_refused_unread(folder, monkeypatch):
    monkeypatch.setattr("moec.codegen.reading.MAX_FILE_BYTES", 1000)
    with pytest.raises(PlanError, match="larger than 1000 bytes"):
        read_plan(folder)


def test_a_graph_that_multiplies_itself_is_refused(folder, monkeypatch):
    monkeypatch.setattr("moec.codegen.checks.MAX_EXPANDED_NODES", 100)
    with pytest.raises(PlanError, match="runs more than 100 nodes"):
        read_plan(folder)


def test_trust_nothing_compares_with_a_fresh_compilation(folder):
    import moec

    assert moec.load(folder, trust_nothing=True).name == "tiny"
    forge(folder, lambda m, s: node(s, "q_1").update(args=[{"node": "q"}, 20000.0]))
    moec.load(folder)
    with pytest.raises(PlanError, match=r"stages/0.json: compiling the Spec inside the plan gives something else"):
        moec.load(folder, trust_nothing=True)
