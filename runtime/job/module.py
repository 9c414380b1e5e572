"""A Program as one `torch.nn.Module`: what a training script calls, sharded or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moec.codegen.emit import Function, emit_function, site_of
from moec.passes.ir import Program
from moec.passes.ir.interface import layer_calls, scalar_blocks
from moec.passes.ir.ops import Capacity
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.errors import JobError
from moec.runtime.job import unscored
from moec.runtime.job.batches import IGNORED_LABEL, Limits, device_of
from moec.runtime.job.checks import Complaint, MustMatch, TpInputs
from moec.runtime.job.home import Home, own_weights
from moec.runtime.job.settings import setting_values
from moec.runtime.job.state import refuse_foreign_state, sign_state
from moec.runtime.job.top_level import TopLevel
from moec.runtime.job.weights import Microbatches, Weights
from moec.runtime.job.wrappers import data_parallel_error, refuse_autocast, refuse_data_parallel

SHAPES = "tokens have shapes from {least} to {most} on the ranks; experts with a capacity want one"
KINDS = (
    "ranks differ in whether they train, have labels, want gradients, and for which parameters: "
    "call `train()`, `no_grad` and `requires_grad_` on every rank or on none"
)


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


@dataclass(slots=True)
class Counts:
    """Counts of a whole step over all ranks, 0-d int64, which losses are divided by; None: each pass counts its own."""

    labels: Tensor | None = None
    tokens: Tensor | None = None
    given: int = 0
    """Labels, ignored ones included, of the forward passes on this rank whose losses were divided by `labels`."""
    valid: int | Tensor = 0
    """Valid labels of those passes, on this rank."""


class Layer(nn.Module):
    """One layer: its number, its parameters, and the function that computes it, which identical layers share."""

    def __init__(self, number: int, function: Function, home: Home, microbatches: Microbatches) -> None:
        super().__init__()
        self.function, self._home, self._number = function, home, torch.tensor(number, device="cpu")
        self._weights = own_weights(
            self, f"layers.{number}.", function.weights, function.sites(number), home, microbatches
        )
        self.register_state_dict_post_hook(sign_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(refuse_foreign_state)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Tensor) -> Any:
        """What the layer's block gives: the residual stream, and of a mixture its counts and balance term."""
        settings = setting_values(self.function.settings, training=self.training)
        return self.function.module(*inputs, self._number, *settings, *self._weights())


class PlanModule(nn.Module):
    """This rank's part of a model. Parameters are named as in the plan (`layers.3.attention.q.weight`).

    They are fp32 masters, whatever the dtype that layers compute in; DTensors where there are several ranks.
    In evaluation mode (`eval()`) experts have the capacity that the file gives for it.
    """

    layers: nn.ModuleList

    def __init__(self, program: Program, limits: Limits, home: Home, *, float64: bool = False) -> None:
        super().__init__()
        self._home, self.limits = home, limits
        self._microbatches, self._counts, self.seen = Microbatches(), Counts(), set[object]()
        self.has_accumulated = False
        self._agreed: tuple[Tensor, bool] | None = None
        self.layers = nn.ModuleList()
        self._routers: list[str] = []
        calls = layer_calls(program)
        functions = {
            name: emit_function(program, name, groups=home.groups, float64=float64)
            for name in dict.fromkeys(call.block for call in calls)
        }
        for call in calls:
            function = functions[call.block]
            self.layers.append(Layer(call.layer, function, home, self._microbatches))
            self._routers += [site_of(op, call.layer) for op in function.routers]
        self._top = TopLevel(program, home, self, self._microbatches, float64=float64)
        self._scalars: dict[str, Function] = {
            name: emit_function(program, name, groups=home.groups, float64=float64) for name in scalar_blocks(program)
        }
        self._padded = counts_own_tokens(program)
        self.num_tokens: int | Tensor = 0
        """Tokens that the last forward pass was given, padding left out."""
        self.expert_counts: dict[int, Tensor] = {}
        """Rows that this rank's tokens sent to each expert in the last forward pass: layer → int64 `[experts]`."""
        self.register_state_dict_post_hook(sign_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(refuse_foreign_state)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """tokens int64 `[batch, sequence]`, labels of the same shape, already shifted, −100 where ignored.

        Raises `JobError` on every rank for a wrong dtype, shape or id, before any collective of the model, and
        for router logits that are NaN or infinite, after those of the layers and before any gradient.
        """
        self._home.require_running()
        refuse_autocast(device_of(tokens).type)
        refuse_data_parallel(self)
        look = self._require_batch(tokens, labels)
        self.num_tokens = self.limits.real_tokens(tokens)
        with unscored.noting() as noted:
            results = self._top.run(self, tokens)
        unfit = unscored.complaint(noted, self._routers) if look else None
        logits, balance = results["logits", None], results.get(("balance", None))
        self.expert_counts = {n: rows[0] for (role, n), rows in results.items() if role == "counts" and n is not None}
        counts = self._counts_of(labels)
        aux_loss = None if balance is None else self._aux_loss(balance, tokens, counts)
        if labels is None:
            if look and self._routers:
                self._home.checks.require("end of a forward pass", unfit)
            return ModelOutput(logits, aux_loss=aux_loss)
        if unfit is not None:  # the loss sums over all ranks: NaN here is NaN on every rank
            logits, labels = torch.full_like(logits, torch.nan), torch.zeros_like(labels)
        loss = self._loss(logits, labels, counts)
        if look and loss.isnan():
            self._home.checks.require("end of a forward pass", unfit)
        return ModelOutput(logits, loss + aux_loss if self.training and aux_loss is not None else loss, aux_loss)

    def _counts_of(self, labels: Tensor | None) -> Counts:
        """What this pass's losses are divided by. Raises `JobError` where `torch.utils.checkpoint` runs it too late."""
        counts = self._counts
        if torch._C._current_graph_task_id() != -1:
            if counts.labels is None and self.has_accumulated:
                raise JobError(
                    "MOE0713",
                    "a forward pass of the whole model is computed again after `with job.accumulate(…)`, which says "
                    "what its loss is divided by",
                    "call `backward()` inside of the block, or checkpoint the layers and not the whole model",
                )
        elif counts.labels is not None and labels is not None:
            counts.given += labels.numel()
            counts.valid = counts.valid + (labels != IGNORED_LABEL).sum()
        return counts

    def _loss(self, logits: Tensor, labels: Tensor, counts: Counts) -> Tensor:
        valid = counts.labels if counts.labels is not None else self.count_labels(labels)
        loss: Tensor = self._scalars["loss"].module(logits, labels, valid)
        return loss

    def _aux_loss(self, balance: Tensor, tokens: Tensor, counts: Counts) -> Tensor:
        count = counts.tokens if counts.tokens is not None else self.count_tokens(tokens)
        aux_loss: Tensor = self._scalars["aux_loss"].module(balance, count)
        return aux_loss

    # ---- for jobs ----------------------------------------------------------------------------------

    def count_labels(self, labels: Tensor) -> Tensor:
        """How many labels of all ranks are valid: 0-d int64. A collective."""
        count: Tensor = self._scalars["valid_labels"].module(labels)
        return count

    def count_tokens(self, tokens: Tensor) -> Tensor | None:
        """How many tokens all ranks have, 0-d int64; None for a model without balance terms. A collective."""
        count: Tensor | None = self._scalars["num_tokens"].module(tokens) if "num_tokens" in self._scalars else None
        return count

    def local_counts(self, tokens: Tensor, labels: Tensor) -> tuple[int, int]:
        """How many labels and tokens of this rank `count_labels` and `count_tokens` count. Waits for the device."""
        return int((labels != IGNORED_LABEL).sum()), int(self.limits.real_tokens(tokens))

    @property
    def is_hooked(self) -> bool:
        """Whether code of the user's runs before its `forward`."""
        hooks = self._forward_pre_hooks or nn.modules.module._global_forward_pre_hooks
        return bool(hooks) or "forward" in self.__dict__

    @property
    def counts_padding(self) -> bool:
        """Whether its balance terms leave out padding, so that tokens and labels are counted separately."""
        return self.limits.padding is not None and "num_tokens" in self._scalars

    @contextmanager
    def counting(self, labels: Tensor | None, tokens: Tensor | None) -> Iterator[Counts]:
        """Within it losses are divided by these counts in place of each forward pass's own."""
        outer, self._counts = self._counts, Counts(labels, tokens)
        try:
            yield self._counts
        finally:
            self._counts = outer

    @contextmanager
    def one_step(self) -> Iterator[Microbatches]:
        """Collects gradients of micro-batches inside the block; drops the remaining ones after it."""
        try:
            yield self._microbatches
        finally:
            self._microbatches.drop()
            self._agreed = None

    def all_weights(self) -> Iterator[Weights]:
        """The `Weights` of the top level and of each layer."""
        yield from self._top.weights
        for layer in self.layers:
            if isinstance(layer, Layer):
                yield layer._weights

    # ---- for PyTorch -------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`torch.compile` of each distinct layer and of the losses, with its options; all else is not compiled."""
        own = (layer.function for layer in self.layers if isinstance(layer, Layer))
        for module in dict.fromkeys(function.module for function in (*own, *self._scalars.values())):
            module.compile(*args, **kwargs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Raises `JobError`: DistributedDataParallel reads this attribute of a module that it is put around."""
        raise data_parallel_error("DistributedDataParallel")

    # ---- checks ------------------------------------------------------------------------------------

    def _require_batch(self, tokens: Tensor, labels: Tensor | None) -> bool:
        """Raises `JobError` for a batch that it cannot take; gives whether this pass checks tensors' values."""
        agreed, self._agreed = self._agreed, None
        if agreed is not None and agreed[0] is tokens:
            return agreed[1]
        checks = self._home.checks
        look = checks.looks(self.seen, ("forward", self.training, labels is not None), device_of(tokens))
        complaint, *matching = self.claims(tokens, labels, look=look)
        checks.require("start of a forward pass", complaint, *matching, inputs=TpInputs((tokens, labels), look))
        return look

    def claims(
        self, tokens: Tensor, labels: Tensor | None, *, look: bool
    ) -> tuple[Complaint | None, MustMatch, MustMatch]:
        """What is wrong with this rank's batch or parameters, and what must match on ranks that begin a forward pass.

        Without `look` it reads no tensor's values.
        """
        words = self.limits.complaint(tokens, labels, look=look)
        complaint = Complaint("MOE0702", words) if words else None
        needed: list[bool] = []
        try:
            if self._home.checks.compares:
                needed = [each for weights in self.all_weights() for each in weights.needed()]
        except JobError as error:
            complaint = complaint or Complaint.of(error)
        shape = tuple(tokens.shape) if self._padded and complaint is None else (0, 0)
        # Ranks that differ in their frozen parameters would start different sums of gradients.
        kind = (int(self.training), int(labels is not None), int(torch.is_grad_enabled()), hash(tuple(needed)))
        return complaint, MustMatch("MOE0702", SHAPES, shape), MustMatch("MOE0702", KINDS, kind)

    def agreed(self, tokens: Tensor, look: bool) -> None:
        """The next forward pass of these tokens skips its agreement: the step has agreed."""
        self._agreed = tokens, look


def counts_own_tokens(program: Program) -> bool:
    """Whether a capacity counts the tokens of one rank, and takes them to be as many on every other."""
    return any(isinstance(op, Capacity) for block in program.blocks for op in block.ops)
