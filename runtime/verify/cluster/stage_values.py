"""The forward passes and losses of a training step in lockstep, with the values that stages send each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moec.passes.ir import OutputKey, Role
from moec.passes.ir.interface import COUNTS, HANDED_ON, forwards, result_role, taken_role
from moec.passes.ir.ops import Call
from moec.runtime.model.stage_messages import StageBatch
from moec.runtime.model.step_counts import sequence_numbers
from moec.runtime.verify.cluster.lockstep import Lockstep
from moec.runtime.verify.cluster.recorded import PerRank, StepError

Sent = dict[Role, PerRank]
"""Values that one stage sends to another for a micro-batch, on every rank, or their gradients."""
Loads = Mapping[int, Tensor]
InputsByRole = Mapping[Role, Sequence[Tensor]]


class StageValues:
    """One step from every rank's tokens and labels; for a layer, from x and a cotangent of y.

    `loads`: the expert loads of each rank `[ranks, experts]` by layer, which give states new values in training.
    `extra_inputs`: the other inputs of `forward` by role. Each of the `microbatches` has equally many of a rank's
    sequences.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        loads: Loads | None = None,
        microbatches: int = 1,
        extra_inputs: InputsByRole | None = None,
    ) -> None:
        self.lockstep, self._graphs, self._loads = lockstep, lockstep.graphs, loads or {}
        self._result = result_role(self._graphs.program)
        self._inputs, self._targets, self._extra_inputs = inputs, targets, extra_inputs or {}
        self._parts, self._target_parts = ([x.tensor_split(microbatches) for x in xs] for xs in (inputs, targets))
        self._extra_parts = {
            role: [x.tensor_split(microbatches) for x in xs] for role, xs in self._extra_inputs.items()
        }
        self._stages = [block.name for block in forwards(self._graphs.program)]
        self._outputs: list[dict[int, dict[OutputKey, PerRank]]] = [{} for _ in self._stages]
        """For each stage, the outputs of its `forward` for each micro-batch."""
        self._received: dict[StageBatch, Sent] = {}
        self.sent: dict[StageBatch, Sent] = {}
        """The values that a stage has sent for a micro-batch, until the next stage receives them."""
        self.sent_back: dict[StageBatch, Sent] = {}
        """The gradients of what a stage has sent, until it receives them."""
        self._gradients: dict[StageBatch, Sent] = {}
        self._divisors: dict[str, PerRank] = {}
        self.losses: dict[str, PerRank] = {}
        """The terms of the loss so far on every rank, by the name of their graph."""
        self.new_states: dict[str, PerRank] = {}
        """The new values of states on every rank, by full name."""

    def agree(self) -> None:
        """Counts the labels and tokens of all ranks and micro-batches, which divide the losses."""
        if self._result == "logits":
            self._divisors["loss"] = self.lockstep.scalar("valid_labels", list(self._targets))
        if self._graphs.has("aux_loss"):
            counted = list(self._extra_inputs.get("real", ())) or [x.detach() for x in self._inputs]
            self._divisors["aux_loss"] = self.lockstep.scalar("num_tokens", counted)

    def receive(self, stage: int, microbatch: int) -> None:
        """Receives what the previous stage has sent, as leaves of this stage's graph."""
        self._received[stage, microbatch] = {
            role: [x.detach().requires_grad_(x.is_floating_point()) for x in values]
            for role, values in self.sent.pop((stage - 1, microbatch)).items()
        }

    def send(self, stage: int, microbatch: int) -> None:
        """Sends the outputs that the next stage takes."""
        outputs = self._outputs[stage][microbatch]
        self.sent[stage, microbatch] = {
            role: outputs[role, None, None] for role in HANDED_ON if (role, None, None) in outputs
        }

    def send_gradients(self, stage: int, microbatch: int) -> None:
        """Sends the gradients of what the stage has received back to the previous stage."""
        received = self._received.pop((stage, microbatch))
        self.sent_back[stage - 1, microbatch] = {role: [x.grad for x in leaves] for role, leaves in received.items()}
        for leaf in (leaf for leaves in received.values() for leaf in leaves):
            leaf.grad = None  # the gradients of weights, which may come later, are not to be added to what was sent

    def received_leaves(self, stage: int, microbatch: int) -> list[Tensor]:
        """What a stage has received on all ranks and differentiates, until it sends the gradients back."""
        received = self._received.get((stage, microbatch), {})
        return [leaf for leaves in received.values() for leaf in leaves if leaf.requires_grad]

    def receive_gradients(self, stage: int, microbatch: int) -> None:
        """Receives the gradients of what the stage has sent."""
        self._gradients[stage, microbatch] = self.sent_back.pop((stage, microbatch))

    def differentiated(self, stage: int, microbatch: int) -> tuple[PerRank, PerRank]:
        """The outputs on all ranks from which a backward pass starts, and their gradients; not for the last stage."""
        outputs, sent_back = self._outputs[stage][microbatch], self._gradients.pop((stage, microbatch))
        values = [value for role in sent_back for value in outputs[role, None, None]]
        pairs = zip(values, (gradient for gradients in sent_back.values() for gradient in gradients), strict=True)
        differentiable = [(value, grad) for value, grad in pairs if value.requires_grad and grad is not None]
        return [value for value, _ in differentiable], [grad for _, grad in differentiable]

    def forward(self, stage: int, microbatch: int) -> None:
        """The forward pass of a stage over a micro-batch. Raises `StepError`.

        Sequences are numbered as rows of the reference's batch (`moec.runtime.verify.inputs`).
        """
        forward, is_last = self._graphs[self._stages[stage]], stage == len(self._stages) - 1
        received = self._received.get((stage, microbatch), {})
        operands = [
            received[value.role] if value.role in received else self._from_batch(value.role, microbatch)
            for value in self._graphs.program.block(self._stages[stage]).inputs
        ]
        results = self.lockstep.run(forward, "", operands)
        outputs = {output.key: values for output, values in zip(forward.results, results, strict=True)}
        roles: list[Role] = [self._result, "balance"] if self._graphs.has("aux_loss") else [self._result]
        if missing := [role for role in roles if is_last and (role, None, None) not in outputs]:
            raise StepError("", forward.graph.output_node(), KeyError(", ".join(sorted(missing))))
        self._outputs[stage][microbatch] = outputs

    def _from_batch(self, role: Role | None, microbatch: int) -> PerRank:
        """An input of the model for a micro-batch, on every rank."""
        parts, data_ranks = [parts[microbatch] for parts in self._parts], self.lockstep.data_ranks
        if role == taken_role(self._graphs.program):
            return parts
        if role == "sequences":
            start = microbatch * (max(data_ranks) + 1)
            sizes = zip(data_ranks, map(len, parts), strict=True)
            return [sequence_numbers(start + rank, size, size) for rank, size in sizes]
        assert role is not None
        return [parts[microbatch] for parts in self._extra_parts[role]]

    def loss(self, microbatch: int) -> PerRank:
        """The training loss of a micro-batch after its forward pass; for a layer `(y * cotangent).sum()`. Both include
        `aux_loss`."""
        outputs, targets = self._outputs[-1][microbatch], [parts[microbatch] for parts in self._target_parts]
        result, terms = outputs[self._result, None, None], dict[str, PerRank]()
        if self._result == "logits":
            terms["loss"] = self.lockstep.loss(result, targets, self._divisors["loss"])
        if self._graphs.has("aux_loss"):
            terms["aux_loss"] = self.lockstep.scalar(
                "aux_loss", outputs["balance", None, None], self._divisors["aux_loss"]
            )
        self.losses = {name: _sums(self.losses[name], term) if self.losses else term for name, term in terms.items()}
        losses = list(terms.values())
        return _sums(*losses) if self._result == "logits" else _sums(self._products(result, targets), *losses)

    def only_loss(self) -> PerRank:
        """The loss of a step of one micro-batch that has not begun, on every rank."""
        self.agree()
        self.forward(0, 0)
        return self.loss(0)

    @property
    def result(self) -> PerRank:
        """Logits or y of all micro-batches on every rank."""
        return self._joined(self._outputs[-1], self._result)

    @property
    def routes(self) -> PerRank | None:
        """The routes of each rank's tokens; None of a model that gives none, and where a step stopped after
        unequally many micro-batches of its stages."""
        if len({len(outputs) for outputs in self._outputs}) > 1:
            return None
        joined = [self._joined(of, "routes") for of in self._outputs if ("routes", None, None) in of[0]]
        return [torch.cat(parts, 2) for parts in zip(*joined, strict=True)] or None

    @property
    def counts(self) -> dict[Role, dict[int, PerRank]]:
        """The counts of each rank's tokens by layers, by role: layer → `[1, …]` of every rank."""
        return {
            role: {
                output.layer: _sums(*(outputs[output.key] for outputs in microbatches.values()))
                for stage, microbatches in zip(self._stages, self._outputs, strict=True)
                for output in self._graphs[stage].results
                if output.role == role and output.layer is not None
            }
            for role in COUNTS
        }

    @property
    def scalars(self) -> dict[str, PerRank]:
        """Scalars that should be equal on all ranks: a model's `loss`, with balance terms, or a layer's `aux_loss`."""
        return {"loss": _sums(*self.losses.values())} if self._result == "logits" else self.losses

    def update_states(self, stage: int) -> None:
        """Gives the states of a stage's layers their new values, in training."""
        ops = self._graphs.program.block(self._stages[stage]).ops if self.lockstep.training else ()
        for call in (op for op in ops if isinstance(op, Call)):
            update = self._graphs.program.block(call.block).update
            if update is not None and call.layer in self._loads:
                graph, counts = self._graphs[update], [*torch.split(self._loads[call.layer], 1)]
                values = self.lockstep.run(graph, f"layers.{call.layer}.update.", [counts])
                named = zip(graph.results, values, strict=True)
                self.new_states.update({f"layers.{call.layer}.{output.state}": value for output, value in named})

    def _joined(self, of_stage: Mapping[int, Mapping[OutputKey, PerRank]], role: Role) -> PerRank:
        """An output of a stage for all micro-batches, on every rank."""
        parts = [outputs[role, None, None] for outputs in of_stage.values()]
        return parts[0] if len(parts) == 1 else [torch.cat(rank_parts) for rank_parts in zip(*parts, strict=True)]

    def _products(self, y: PerRank, cotangents: Sequence[Tensor]) -> PerRank:
        """`(y * cotangent).sum()` of every rank, in at least fp32. The gradient of y is the cotangent, exactly."""
        for value, cotangent in zip(y, cotangents, strict=True):
            if not isinstance(value, Tensor) or value.shape != cotangent.shape:
                output = self._graphs[self._stages[-1]].graph.output_node()
                raise StepError("", output, ValueError(f"y has another shape than x, {list(cotangent.shape)}"))
        wide = torch.promote_types(cotangents[0].dtype, torch.float32)
        return [(value.to(wide) * cotangent).sum() for value, cotangent in zip(y, cotangents, strict=True)]


def _sums(*terms: PerRank) -> PerRank:
    """The sum of several values on every rank."""
    return terms[0] if len(terms) == 1 else [sum(rank_terms) for rank_terms in zip(*terms, strict=True)]
