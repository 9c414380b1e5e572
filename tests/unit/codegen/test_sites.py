"""Collectives know what of the model they serve, so that a message about one can say it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import moe_plan
from torch import fx, nn

from moec.codegen.fx import build_module, parameter_sites
from moec.codegen.graph import StageGraphs
from moec.codegen.operators import CONVERSIONS
from moec.runtime import operators  # noqa: F401  (registers torch.ops.moec.*)


def build(stage: StageGraphs) -> fx.GraphModule:
    return build_module(stage, "forward", lambda _: nn.Parameter(torch.empty(0)))


def sites(module: fx.GraphModule) -> dict[str, str]:
    """Of every collective, by the path of its module and its node's name."""
    found = {}
    for path, part in module.named_modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.meta["moec"].target in CONVERSIONS:
                    found[f"{path}.{node.name}"] = node.kwargs["site"]
    return found


def test_every_collective_names_its_layer_and_line():
    found = sites(build(moe_plan(ranks=4, ep=2, tp=2).stages[0]))
    in_layers = {path: site for path, site in found.items() if path.startswith("layers.")}
    assert len(in_layers) > 10
    for path, site in in_layers.items():
        assert site.startswith(f"layer {path.split('.')[1]} (tiny.moe:"), path
    others = {site.partition(" (")[0] for path, site in found.items() if path not in in_layers}
    assert others
    assert all(site.startswith("the model's ") for site in others)


def test_every_parameter_names_what_uses_it():
    plan = moe_plan(ranks=4, ep=2)
    found = parameter_sites(build(plan.stages[0]))
    assert found.keys() == plan.parameters.keys()
    assert all(site.startswith("layer 1 (tiny.moe:") for name, site in found.items() if name.startswith("layers.1."))


@pytest.mark.parametrize("quote", ["'", '"', "'''", "\\'", "\n"])
def test_a_line_that_is_code_stays_text(quote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch.fx writes the words into source: whatever a plan claims its `.moe` line is, it is quoted there."""
    monkeypatch.chdir(tmp_path)
    code = f"{quote}, __import__('pathlib').Path('planted').touch(), {quote}"
    stage = moe_plan(ranks=2, ep=2).stages[0]
    planted = stage.model_copy(
        update={
            "graphs": tuple(
                graph.model_copy(
                    update={"nodes": tuple(node.model_copy(update={"span": code}) for node in graph.nodes)}
                )
                for graph in stage.graphs
            )
        }
    )
    found = sites(build(planted))
    assert found
    assert all(site.endswith(f"({code})") for site in found.values())
    assert not Path("planted").exists()
