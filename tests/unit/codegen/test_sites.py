"""Collectives have a site: the part of the model that they serve, for messages."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import layer_plan, moe_plan
from support.tables import each_row
from torch import fx

from moec.codegen.emit import LAYER, emit_function, emit_graph, info_of, site_of, target_name, weight_users
from moec.codegen.plan import Plan
from moec.grammar.source import Source, Span
from moec.passes.ir import Mesh, Op, Program, Value
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import Conversion
from moec.runtime.ranks.watch import located
from moec.runtime.verify.cluster.shuffles import NODES

COLLECTIVES = NODES.keys() - {"moec.embed_part.default", "moec.label_logit.default"}


def collectives(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if target_name(node) in COLLECTIVES]


def sites(plan: Plan) -> dict[str, str]:
    """The site of every collective, by the path of its layer or the name of its block, and its value."""
    found = {}
    for block, layers in plan.program.layers_by_block.items():
        for node in collectives(emit_graph(plan.program, plan.program.block(block))):
            op, site = info_of(node).op, node.kwargs["site"]
            assert isinstance(op, Conversion)
            assert isinstance(site, str)
            assert ("layer" in node.kwargs) == bool(layers)
            for number in layers:
                found[f"layers.{number}.{op.results[0].name}"] = located(site, torch.tensor(number))
            if not layers:
                found[f"{block}.{op.results[0].name}"] = located(site, None)
    return found


def test_every_collective_names_its_layer_and_line():
    found = sites(moe_plan(ranks=4, ep=2, tp=2))
    in_layers = {path: site for path, site in found.items() if path.startswith("layers.")}
    assert len(in_layers) > 10
    for path, site in in_layers.items():
        assert site.startswith(f"layer {path.split('.')[1]} (tiny.moe:"), path
    others = {path: site for path, site in found.items() if path not in in_layers}
    assert others
    assert all(site.startswith(f"the model's {path.partition('.')[2]} (tiny.moe:") for path, site in others.items())


def test_a_layers_number_is_what_its_graph_is_given():
    """Identical layers share a graph: a collective gets the layer's number from that input."""
    plan = moe_plan(ranks=4, ep=2, tp=2)
    for block, layers in plan.program.layers_by_block.items():
        graph = emit_graph(plan.program, plan.program.block(block))
        given = [node for node in graph.nodes if info_of(node).key == LAYER]
        assert len(given) == bool(layers)
        assert all(node.kwargs.get("layer") in (given or [None]) for node in collectives(graph))


@each_row("make", [moe_plan, lambda: moe_plan(tp=2, ep=4), lambda: layer_plan(ep=4)])
def test_every_parameter_names_what_uses_it(make: Callable[[], Plan]):
    plan = make()
    forward = weight_users(plan.program.block(FORWARD))
    found = {name: site_of(op, None) for name, op in forward.items()}
    for block, layers in plan.program.layers_by_block.items():
        for number in layers:
            sites = emit_function(plan.program, block).sites(number)
            found.update({f"layers.{number}.{name}": site for name, site in sites.items()})
    assert found.keys() == plan.parameters.keys()
    for name, site in found.items():
        whose = f"layer {name.split('.')[1]}" if name.startswith("layers.") else "the model's "
        assert site.startswith(whose), name
        assert f" ({plan.name}.moe:" in site, name


# ---- torch.fx writes a graph as Python source and runs it ----------------------------------------------

QUOTES = ["'", '"', "'''", "\\'", "\n", ") -> None: pass\n", "{layer}"]


def functions(program: Program) -> list[str]:
    """The blocks whose graphs are run as Python; `forward` runs node by node."""
    return [block.name for block in program.blocks if not block.name.startswith(FORWARD)]


def code(quote: str) -> str:
    return f"{quote}, __import__('pathlib').Path('planted').touch(), {quote}"


def require_text(module: fx.GraphModule) -> None:
    """The source that ran equals the graph, and contains no code of the plan."""
    tree = ast.parse(module.code)
    assert "__import__" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert [type(statement) for statement in tree.body if not isinstance(statement, ast.Import | ast.ImportFrom)] == [
        ast.FunctionDef
    ]
    assert not Path("planted").exists()


@pytest.mark.parametrize("quote", QUOTES)
def test_a_line_that_is_code_stays_text(quote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch.fx writes sites into source: any text in place of a `.moe` line is quoted there."""
    monkeypatch.chdir(tmp_path)
    plan = moe_plan(ranks=2, ep=2)
    span = Span(Source(code(quote), ""), 0, 0)
    blocks = [replace(block, ops=tuple(replace(op, span=span) for op in block.ops)) for block in plan.program.blocks]
    planted = replace(plan.program, blocks=tuple(blocks))
    found = 0
    for block in functions(planted):
        module = emit_function(planted, block).module
        require_text(module)
        for node in collectives(module.graph):
            assert str(node.kwargs["site"]).endswith(f"({code(quote)}:1)")
            found += 1
    assert found > 5


@pytest.mark.parametrize("quote", QUOTES)
def test_names_that_are_code_stay_text(quote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names of blocks, values, parameters, meshes and axes."""
    monkeypatch.chdir(tmp_path)
    program = _renamed(moe_plan(ranks=4, ep=2, tp=2).program, code(quote))
    assert all("__import__" in block.name for block in program.blocks)
    for block in functions(program):
        function = emit_function(program, block, groups=code(quote))
        require_text(function.module)
        assert all(
            name.endswith(code(quote)) for name in (*function.weights, *(each.name for each in function.results))
        )
        for node in collectives(function.module.graph):
            (group,) = (arg for arg in node.args if isinstance(arg, str))
            assert group.startswith(code(quote))


def _renamed(program: Program, words: str) -> Program:
    """`program` with `words` at the end of every name but that of `forward`'s layers, which are numbers."""

    def value(old: Value) -> Value:
        return replace(old, name=old.name + words, ragged=old.ragged + words if old.ragged else None)

    def attribute(op: Op, name: str) -> Any:
        return getattr(op, name) + words if name == "block" else getattr(op, name)

    blocks = []
    for block in program.blocks:
        found = []
        for op in block.ops:
            names = [f.name for f in fields(op) if f.name not in ("operands", "results", "span")]
            changed = {name: attribute(op, name) for name in names}
            operands = tuple(name + words for name in op.operands)
            found.append(replace(op, operands=operands, results=tuple(map(value, op.results)), **changed))
        blocks.append(
            replace(
                block,
                name=block.name + words,
                inputs=tuple(map(value, block.inputs)),
                parameters=tuple(replace(p, name=p.name + words) for p in block.parameters),
                ops=tuple(found),
                outputs=tuple(replace(each, name=each.name + words) for each in block.outputs),
                experts=block.experts + words if block.experts else None,
            )
        )
    meshes = tuple(Mesh(mesh.name + words if mesh.name != "dense" else "dense", mesh.axes) for mesh in program.meshes)
    return replace(program, blocks=tuple(blocks), meshes=meshes)
