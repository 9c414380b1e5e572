"""Checks that ops share: of scores, choices, keys of tokens, activations, and the setting `$training`."""

from __future__ import annotations

from collections.abc import Sequence

from moec.passes.ir.activations import ACTIVATIONS, PARAMETERS
from moec.passes.ir.op import Op, require
from moec.passes.ir.value import TRAINING, Dim, Setting, Value


def require_training(op: Op, training: Value) -> None:
    """Requires the setting `$training`."""
    require(isinstance(training, Setting) and training.name == TRAINING.name, op, "wants the setting $training")


def require_training_where(op: Op, varies: bool, settings: Sequence[Value]) -> None:
    """Requires `$training` alone where the op's capacity `varies` between training and evaluation, else no setting."""
    scalar = all(isinstance(v, Setting) and v.name == TRAINING.name for v in settings)
    require(len(settings) == int(varies) and scalar, op, "wants $training where its capacity varies")


def require_keys(op: Op, keys: Value, x: Value | None = None) -> None:
    """Requires keys `[batch, sequence]`, those of the tokens of x `[batch, sequence, …]`."""
    fits = len(keys.shape) == 2 if x is None else keys.shape == x.shape[:2]
    require(keys.dtype == "int64" and fits, op, "wants a key for each token")


def require_choices(op: Op, experts: Value, logits: Value | None = None) -> None:
    """Requires experts `[batch, sequence, k]`, those of the tokens of `logits` `[batch, sequence, experts]`."""
    fits = len(experts.shape) == 3 if logits is None else experts.shape[:-1] == logits.shape[:-1]
    require(experts.dtype == "int64" and fits, op, "wants experts of each token")


def require_activation(op: Op, word: str, parts: Dim) -> None:
    """Requires the activation's number of parts, and of `PARAMETERS` only those that the activation has."""
    kind, parameters = ACTIVATIONS[word], [name for name in PARAMETERS if getattr(op, name) is not None]
    require(parts == kind.parts, op, f"{parts} parts")
    require(set(parameters) <= set(kind.parameters), op, f"{word} has no {' and no '.join(parameters)}")


def require_scores(op: Op, scores: Value, noun: str = "scores") -> None:
    """Requires floating numbers `[batch, sequence, experts]`."""
    fits = scores.dtype != "int64" and len(scores.shape) == 3 and isinstance(scores.shape[-1], int)
    require(fits, op, f"wants {noun} of every expert")
