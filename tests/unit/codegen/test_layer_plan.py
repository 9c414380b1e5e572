"""The plan of a `layer` file: written, read, and refused if it differs from its Spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.plans import layer_plan, layer_text, moe_plan

import moec
from moec.codegen.folder import PlanError
from moec.passes.ir.interface import scalar_blocks


def test_a_plan_of_a_layer_reads_back_as_it_was_written(tmp_path: Path):
    plan = layer_plan(ep=2, beside="capacity = factor(1.25); group = batch")
    plan.save(tmp_path / "ffn.plan")
    again = moec.load(tmp_path / "ffn.plan", trust_nothing=True)
    assert again == plan
    assert not again.spec.has_model


def test_its_scalars_are_those_of_the_balance_alone():
    assert scalar_blocks(layer_plan().program) == ("num_tokens", "aux_loss")
    assert scalar_blocks(layer_plan(balance="[]").program) == ()


def test_a_layers_program_under_a_models_spec_is_refused(tmp_path: Path):
    layer, model = layer_plan(ranks=2, ep=2), moe_plan(ranks=2, ep=2)
    renamed = replace(layer, program=replace(layer.program, name="tiny"))
    fitting = replace(renamed, spec_text=layer.spec_text.replace('"ffn"', '"tiny"'))
    assert moec.load(fitting.save(tmp_path / "fitting.plan")).name == "tiny"
    forged = replace(renamed, spec_text=model.spec_text)
    with pytest.raises(PlanError, match="forward does not give what the Spec says"):
        moec.load(forged.save(tmp_path / "forged.plan"))


def test_ranks_override_the_cluster_and_stand_in_the_plan(tmp_path: Path):
    plan = moec.compile(layer_text(ranks=None), world_size=4)
    assert (plan.world_size, plan.meshes["experts[0]"].size("ep")) == (4, 4)
    plan.save(tmp_path / "ffn.plan")
    assert moec.load(tmp_path / "ffn.plan", trust_nothing=True).world_size == 4
    with pytest.raises(ValueError, match="world_size must be a number"):
        moec.compile(layer_text(), world_size=0)


def test_without_a_cluster_a_layer_is_whole_on_one_rank():
    plan = moec.compile(layer_text(ranks=None))
    assert plan.world_size == 1
    assert not any(parameter.sum_over for parameter in plan.parameters.values())
