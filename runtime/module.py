"""A stage's graphs as one `torch.nn.Module`: what a training script calls, sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from moec.codegen.checks import scalar_graphs
from moec.codegen.fx import MakeParameter, build_module, operator_sites, parameter_sites
from moec.codegen.graph import Ref, StageGraphs
from moec.grammar.spec import Model
from moec.runtime import (
    operators,  # noqa: F401  (registers torch.ops.moec.*)
    unscored,
)
from moec.runtime.errors import JobError

IGNORED_LABEL = -100
WITHOUT_SCORES = (
    "go on from the last weights that were finite, with a lower learning rate or with gradients clipped "
    "(`job.clip_grad_norm_`); where it is the batch, catch this error and leave it out: no gradient was computed"
)
_CAPACITY = ("moec.permute_padded.default", "moec.keep_choices.default")

Agree = Callable[[str, str | None, tuple[int, ...], torch.device], str | None]
"""Takes where it is, this rank's complaint and what must be alike on all; gives every rank one complaint, or None."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """`logits` `[batch, sequence, vocab]` of this rank's tokens; `loss`, a scalar, where labels were given; `aux_loss`.

    With tensor parallelism a rank has the logits of its own `vocab / tp` ids (where `tp` does not divide them all,
    those of its own `sequence / tp` tokens); `Job.whole_logits` gathers them.
    The loss is that of the whole global batch, the same on every rank: cross-entropy over the global number of valid
    labels, and in training plus `aux_loss`: the weighted balance terms, a scalar, None where the model has none.
    """

    logits: Tensor
    loss: Tensor | None = None
    aux_loss: Tensor | None = None


def _alone(site: str, complaint: str | None, alike: tuple[int, ...], device: torch.device) -> str | None:
    return complaint


class PlanModule(nn.Module):
    """This rank's part of a model. Parameters are named as in the plan (`layers.3.attention.q.weight`).

    In evaluation mode (`eval()`) experts have the capacity that the file gives for it.
    """

    def __init__(
        self,
        model: Model,
        context: int,
        stage: StageGraphs,
        make_parameter: MakeParameter,
        agree: Agree = _alone,
        *,
        tensor_parallel: int = 1,
        float64: bool = False,
    ) -> None:
        super().__init__()
        forward = build_module(stage, "forward", make_parameter, float64=float64)
        # Its children are this module's own, so that names have no prefix; the graph itself stands beside them.
        for name, child in forward.named_children():
            self.add_module(name, child)
        self.__dict__["_forward_graph"] = self.__dict__["_evaluation_graph"] = forward
        evaluated = stage.in_evaluation()
        if evaluated is not stage:
            # Other numbers in the same graph, over the same parameters.
            evaluation = build_module(evaluated, "forward", self.get_parameter, float64=float64)
            self.__dict__["_evaluation_graph"] = evaluation
        self.__dict__["_loss_graphs"] = {
            name: build_module(stage, name, make_parameter, float64=float64) for name in scalar_graphs(stage)
        }
        self._results = [arg.node for arg in stage.graph("forward").nodes[-1].args if isinstance(arg, Ref)]
        self._agree = agree
        self._routers = operator_sites(forward, "moec.route.default")
        self._padded = any(n.target in _CAPACITY for g in stage.graphs for n in g.nodes)
        self.vocab, self.context, self.tensor_parallel = model.vocab, context, tensor_parallel
        self.num_tokens = 0
        """Tokens that the last forward pass was given."""
        self.expert_counts: dict[int, Tensor] = {}
        """Rows that this rank's tokens sent to each expert in the last forward pass: layer → int64 `[experts]`."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """tokens int64 `[batch, sequence]`, labels alike, already shifted, −100 where there is none.

        Raises `JobError`, alike on every rank, for a wrong dtype, shape or id, before any collective of the model, and
        for router logits that are NaN or infinite, after those of the layers and before any gradient.
        """
        # A capacity counts the tokens of one rank, and takes them to be as many on every other.
        alike = tuple(tokens.shape) if self._padded and tokens.dim() == 2 else (0, 0)
        complaint = self._agree("start of a forward pass", self._complaint(tokens, labels), alike, tokens.device)
        if complaint:
            raise JobError("MOE0702", complaint)
        self.num_tokens = tokens.numel()
        graph: fx.GraphModule = self.__dict__["_forward_graph" if self.training else "_evaluation_graph"]
        with unscored.noting() as noted:
            out = graph(tokens)
        self._require_scores(noted, tokens.device)
        results = dict(zip(self._results, out if isinstance(out, tuple) else (out,), strict=True))
        logits, balance = results.pop("logits"), results.pop("balance", None)
        self.expert_counts = {int(name.removeprefix("counts_")): counts[0] for name, counts in results.items()}
        graphs: dict[str, fx.GraphModule] = self.__dict__["_loss_graphs"]
        aux_loss = None if balance is None else graphs["aux_loss"](balance, graphs["num_tokens"](tokens))
        if labels is None:
            return ModelOutput(logits, aux_loss=aux_loss)
        loss = graphs["loss"](logits, labels, graphs["valid_labels"](labels))
        return ModelOutput(logits, loss + aux_loss if self.training and aux_loss is not None else loss, aux_loss)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`torch.compile` of the graphs, with its options; the checks of a batch stay outside, so `fullgraph` holds."""
        graphs = (self.__dict__["_forward_graph"], self.__dict__["_evaluation_graph"])
        for graph in (*graphs, *self.__dict__["_loss_graphs"].values()):
            graph.compile(*args, **kwargs)

    def parameter_sites(self) -> dict[str, str]:
        """What of the model uses each parameter, in words; by the parameter's name."""
        return parameter_sites(self.__dict__["_forward_graph"])

    def _require_scores(self, noted: Sequence[Tensor], device: torch.device) -> None:
        if not self._routers:
            return
        complaint = self._agree("end of a forward pass", unscored.complaint(noted, self._routers), (), device)
        if complaint:
            raise JobError("MOE0708", complaint, WITHOUT_SCORES)

    def _complaint(self, tokens: Tensor, labels: Tensor | None) -> str | None:
        for name, ids in (("tokens", tokens), ("labels", labels)):
            if ids is None:
                continue
            if ids.dtype != torch.int64:
                return f"{name} are {ids.dtype}, and must be torch.int64"
            if ids.dim() != 2:
                return f"{name} have shape {list(ids.shape)}, and must be [batch, sequence]"
            if ids.shape != tokens.shape:
                return f"{name} have shape {list(ids.shape)}, and tokens {list(tokens.shape)}"
            if ids.shape[1] > self.context:
                return f"{name} are {ids.shape[1]} long, and the model's context is {self.context}"
            if ids.shape[1] % self.tensor_parallel:
                return f"{name} are {ids.shape[1]} long, which tp = {self.tensor_parallel} does not divide"
            valid = ids[ids != IGNORED_LABEL] if name == "labels" else ids
            if valid.numel():
                low, high = (int(bound) for bound in valid.aminmax())
                if low < 0 or high >= self.vocab:
                    wrong = low if low < 0 else high
                    return f"{name} contain the id {wrong}, and the vocabulary is 0 to {self.vocab - 1}"
        return None
