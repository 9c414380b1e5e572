"""The plan of a `layer` file: written, read, and refused where it is not what its Spec says."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import layer_plan, layer_text, moe_plan

import moec
from moec.codegen.checks import require_consistent, scalar_graphs
from moec.codegen.folder import PlanError
from moec.codegen.plan import Plan


def test_a_plan_of_a_layer_reads_back_as_it_was_written(tmp_path: Path):
    plan = layer_plan(ep=2, beside="capacity = factor(1.25); group = batch")
    plan.save(tmp_path / "ffn.plan")
    again = moec.load(tmp_path / "ffn.plan", trust_nothing=True)
    assert (again.manifest, again.stages) == (plan.manifest, plan.stages)
    assert not again.spec.has_model


def test_its_scalars_are_those_of_the_balance_alone():
    assert scalar_graphs(layer_plan().stages[0]) == ("num_tokens", "aux_loss")
    assert scalar_graphs(layer_plan(balance="[]").stages[0]) == ()


def test_a_layers_graphs_under_a_models_spec_are_refused(tmp_path: Path):
    layer = layer_plan(ranks=2, ep=2)
    text = layer.manifest.spec.replace('"ffn"', '"tiny"')
    layer = Plan(layer.manifest.model_copy(update={"name": "tiny", "spec": text}), layer.stages)
    require_consistent(tmp_path, layer)
    model_spec = moe_plan(ranks=2, ep=2).manifest.spec
    forged = Plan(layer.manifest.model_copy(update={"spec": model_spec}), layer.stages)
    with pytest.raises(PlanError, match="forward graph does not give what the Spec inside it says"):
        require_consistent(tmp_path, forged)


def test_ranks_override_the_cluster_and_stand_in_the_plan(tmp_path: Path):
    plan = moec.compile(layer_text(ranks=None), world_size=4)
    assert (plan.world_size, plan.meshes["experts[0]"].size("ep")) == (4, 4)
    plan.save(tmp_path / "ffn.plan")
    assert moec.load(tmp_path / "ffn.plan", trust_nothing=True).world_size == 4
    with pytest.raises(ValueError, match="world_size is a number from 1"):
        moec.compile(layer_text(), world_size=0)


def test_without_a_cluster_a_layer_is_whole_on_one_rank():
    plan = moec.compile(layer_text(ranks=None))
    assert plan.world_size == 1
    assert not any(parameter.sum_over for parameter in plan.parameters.values())
