"""The unsharded model or layer as `moec verify` runs it: one interface for both, parameters named as in a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moec.grammar.spec import Spec
from moec.passes.ir import Role
from moec.passes.ir.interface import COUNTS
from moec.runtime.host.layer import MoeLayer
from moec.runtime.host.reference import layer_reference, reference
from moec.runtime.model.model_output import ModelOutput
from moec.runtime.model.module import PlanModule
from moec.runtime.verify.cluster.lockstep import VERIFY_SETTINGS
from moec.runtime.verify.inputs import GlobalBatch


class LayerModel(nn.Module):
    """A layer whose parameters have their names in a plan, `layers.0.moe.gate.weight`."""

    def __init__(self, layer: MoeLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"moe": layer})])
        self.layer = [layer]  # a list hides it from `nn.Module`


Unsharded = PlanModule | LayerModel


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a forward pass over a global batch.

    `result`: logits or y. `scalars`: equal on every rank, the loss of a model or the `aux_loss` of a layer.
    `differentiated`: the scalar that backward starts from, a model's loss or a layer's
    `(y * cotangent).sum() + aux_loss`. `counts`: what layers count, by role and layer. `states`: the new value that
    `GlobalBatch.loads` give each state, by full name; none in evaluation. `routes`: the experts that tokens chose, for
    a model that gives them.
    """

    result: Tensor
    scalars: Mapping[str, Tensor]
    differentiated: Tensor
    counts: Mapping[Role, Mapping[int, Tensor]]
    states: Mapping[str, Tensor]
    routes: Tensor | None = None


def unsharded(spec: Spec, *, seed: int = 0, dtype: torch.dtype, microbatches: int = 1) -> Unsharded:
    """The reference of a `model` or `layer` file, for a batch of `microbatches` in order."""
    if spec.has_model:
        return reference(spec, seed=seed, dtype=dtype, microbatches=microbatches)
    return LayerModel(layer_reference(spec, seed=seed, dtype=dtype))


def outcome(model: Unsharded, batch: GlobalBatch) -> Outcome:
    """Runs the unsharded model over the batch: forward only."""
    if isinstance(model, PlanModule):
        model.set(**VERIFY_SETTINGS)
        model.takes = replace(model.takes, mixed=True)
        output = model(batch.inputs, batch.targets, **batch.model_arguments)
        loss = training_loss(model, output)
        total_loads = {layer: rows.sum(0, keepdim=True) for layer, rows in batch.loads.items()}
        states = model.new_states(total_loads) if model.training else {}
        counts = dict(zip(COUNTS, (model.expert_counts, model.head_counts, model.choices_made), strict=True))
        return Outcome(output.logits, {"loss": loss}, loss, counts, states, output.routes)
    (layer,) = model.layer
    y = layer(batch.inputs)
    assert layer.expert_counts is not None
    scalars = {} if layer.aux_loss is None else {"aux_loss": layer.aux_loss}
    loads = batch.loads.values() if layer.training else ()  # of the one layer, if it has states
    new_values = [layer.biases.new_values(layer, rows.sum(0, keepdim=True)) for rows in loads]
    states = {f"layers.0.{name}": value for values in new_values for name, value in values.items()}
    differentiated = sum(scalars.values(), (y * batch.targets).sum())
    return Outcome(y, scalars, differentiated, {"counts": {0: layer.expert_counts}}, states)


def states_of(model: Unsharded) -> dict[str, Tensor]:
    """The states of a model, by full name."""
    return dict(model.named_buffers())


def result_name(spec: Spec) -> str:
    """The name of a forward pass's result in messages."""
    return "the logits" if spec.has_model else "y"


def training_loss(model: PlanModule, output: ModelOutput) -> Tensor:
    """The loss with balance terms, also in evaluation, where `output.loss` has none."""
    assert output.loss is not None
    return output.loss if model.training or output.aux_loss is None else output.loss + output.aux_loss
