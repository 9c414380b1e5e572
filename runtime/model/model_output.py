"""The result of a model's `forward`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moec.runtime.errors import JobError


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    """`logits` `[batch, sequence, vocab]` of this rank's tokens, or `[batch, classes]` of its images; `loss`, a scalar,
    where labels were given; `aux_loss`.

    With tensor parallelism a rank has the logits of `vocab / tp` ids, or of `sequence / tp` tokens if `tp` does not
    divide `vocab`; `Job.whole_logits` gathers them. `loss` is the loss of the global batch, the same on every rank:
    cross-entropy over the global number of valid labels, and in training plus `aux_loss`. `aux_loss` is the sum of the
    weighted balance terms, a scalar, None if the model has none. In `Job.step` and `Job.accumulate` both are a
    micro-batch's share: those of all micro-batches add up to the step's. `routes`, of a plan with `replay`: the experts
    of this rank's tokens before a capacity drops any, int64 `[batch, sequence, mixtures, k]`; −1 for padding and for
    places beyond a layer's k.
    """

    logits: Tensor
    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    routes: Tensor | None = None


class _LogitsElsewhereError(JobError, AttributeError):
    """For `hasattr` and `getattr` an attribute that is missing."""


class OutputWithoutLogits(ModelOutput):
    """The result on a rank of a pipeline whose last stage, `place`, is on other ranks: reading `logits` raises."""

    __slots__ = ("_place",)
    _place: str

    def __init__(self, place: str, loss: Tensor, aux_loss: Tensor | None, routes: Tensor | None) -> None:
        for name, value in {"_place": place, "loss": loss, "aux_loss": aux_loss, "routes": routes}.items():
            object.__setattr__(self, name, value)

    @property
    def logits(self) -> Tensor:
        """Raises `JobError`."""
        help = "every rank has `.loss`; read the logits where `job.is_last_stage`"
        raise _LogitsElsewhereError("MOE0711", f"the logits are in {self._place}", help)

    def __repr__(self) -> str:
        return f"<loss {self.loss}, aux_loss {self.aux_loss}, logits in {self._place}>"
