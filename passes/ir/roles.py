"""Roles: the meanings of the inputs and outputs of blocks. `ROLES` has the shape, dtypes and layout of each role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from moec.passes.ir.value import Dim

Role = Literal[
    "tokens",
    "images",
    "positions",
    "segments",
    "real",
    "sequences",
    "keys",
    "past",
    "labels",
    "residual",
    "logits",
    "routes",
    "choices",
    "counts",
    "head_counts",
    "made",
    "balance",
    "probabilities",
    "counted",
    "choice_counts",
    "valid",
    "num_tokens",
    "loss",
    "state",
]
"""The meaning of a block's input or output. Code finds values by role, never by name."""

Lies = Literal["sharded over dp", "replicated", "source by source", "partial", "as tokens", "as given"]
"""The layout of an input of a role on the dense mesh. In this order: cut over dp by sequences, and whole on ranks of cp
and tp; equal on every rank; cut by its first dim over the ranks that have different tokens; a partial sum over
these ranks; the layout of the residual stream; the layout of the output of `forward` that has the role."""

IGNORED_LABEL = -100
"""The label of a token whose loss does not count."""

FREE_ROUTE = -2
"""An entry of `routes` that leaves the choice to the gate."""

WIDTH = -1
"""In the shape of a role: a dim of any constant size."""


GROUPS = "groups"
"""In the shape of a role: the number of routing groups, `batch`, `data_ranks` or 1."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """The values of one role: their shape, the dtypes that they may have, and the layout of an input of the role.

    `image_shape` is their shape in a model of images, where it differs. `in_layers`: whether a layer may have such an
    input beside the residual stream. No value has a role without a shape, except outputs of the role `state`, which
    have the type of the state.
    """

    doc: str
    shape: tuple[Dim, ...] | None = None
    dtypes: tuple[str, ...] = ("int64",)
    lies: Lies | None = None
    in_layers: bool = False
    image_shape: tuple[Dim, ...] | None = None


_FLOATING = ("bf16", "fp16", "fp32", "fp64")


def _per_token(doc: str, *, in_layers: bool = False) -> RoleSpec:
    """A whole number of each token."""
    return RoleSpec(f"{doc}, [batch, sequence]", ("batch", "sequence"), lies="sharded over dp", in_layers=in_layers)


ROLES: Mapping[Role, RoleSpec] = {
    "tokens": _per_token("token ids", in_layers=True),
    "images": RoleSpec(
        "pixels, [batch, channels, height, width]",
        ("batch", WIDTH, WIDTH, WIDTH),
        _FLOATING,
        "sharded over dp",
    ),
    "positions": _per_token("the place of each token in its text", in_layers=True),
    "segments": _per_token("which of several packed texts each token belongs to", in_layers=True),
    "real": _per_token("1 for each token that is no padding, else 0", in_layers=True),
    "sequences": RoleSpec(
        "the number of each sequence in the global batch of the step, [batch]", ("batch",), lies="sharded over dp"
    ),
    "keys": _per_token("a key of each token in this step, from which its random numbers are drawn", in_layers=True),
    "past": RoleSpec("keys and values of earlier tokens"),
    "labels": RoleSpec(
        f"the ids that the model is to predict, {IGNORED_LABEL} where none is, [batch, sequence]; classes [batch]",
        ("batch", "sequence"),
        lies="sharded over dp",
        image_shape=("batch",),
    ),
    "residual": RoleSpec(
        "the residual stream, or x and y of a layer by itself, [batch, sequence, dim]",
        ("batch", "sequence", WIDTH),
        _FLOATING,
        "as tokens",
    ),
    "logits": RoleSpec(
        "scores of every id for each token, [batch, sequence, vocab]; of classes for each image, [batch, classes]",
        ("batch", "sequence", WIDTH),
        _FLOATING,
        "as given",
        image_shape=("batch", WIDTH),
    ),
    "routes": RoleSpec(
        "the experts that each token goes to in each mixture, -1 for none, [batch, sequence, mixtures, k]",
        ("batch", "sequence", WIDTH, WIDTH),
        lies="sharded over dp",
    ),
    "choices": RoleSpec(
        "the experts that each token goes to in one layer, -1 for none, [batch, sequence, k]",
        ("batch", "sequence", WIDTH),
        lies="sharded over dp",
        in_layers=True,
    ),
    "counts": RoleSpec(
        "rows that a rank's tokens sent to each expert of one layer, [sources, experts]",
        ("sources", WIDTH),
        lies="source by source",
    ),
    "head_counts": RoleSpec(
        "choices of a rank's tokens of each group of attention heads of one layer, [sources, groups]",
        ("sources", WIDTH),
        lies="source by source",
    ),
    "made": RoleSpec(
        "the number of choices that a rank's tokens made in one layer before a capacity drops any, [sources, 1]",
        ("sources", WIDTH),
        lies="source by source",
    ),
    "balance": RoleSpec("the weighted balance terms, a sum over tokens", (), _FLOATING, "partial"),
    "probabilities": RoleSpec(
        "each token's probabilities of the experts, of one layer or summed over layers, [batch, sequence, experts]",
        ("batch", "sequence", WIDTH),
        _FLOATING,
    ),
    "counted": RoleSpec(
        "the experts that a balance term over all layers counts for each token of one, [batch, sequence, k]",
        ("batch", "sequence", WIDTH),
    ),
    "choice_counts": RoleSpec(
        "how often each routing group chose each expert in the layers so far, [groups, experts]",
        (GROUPS, WIDTH),
    ),
    "valid": RoleSpec("the number of labels that are not ignored, on all ranks", (), lies="replicated"),
    "num_tokens": RoleSpec("the number of tokens on all ranks, padding left out", (), lies="replicated"),
    "loss": RoleSpec("a term of the training loss, equal on every rank", (), _FLOATING),
    "state": RoleSpec("the new value of a state"),
}
