"""What ops over tokens want of their operands: scores, choices, keys of tokens, and the setting `$training`."""

from __future__ import annotations

from moec.passes.ir.op import Op, require
from moec.passes.ir.value import TRAINING, Setting, Value


def require_training(op: Op, training: Value) -> None:
    """Requires the setting `$training`."""
    require(isinstance(training, Setting) and training.name == TRAINING.name, op, "wants the setting $training")


def require_keys(op: Op, keys: Value, x: Value | None = None) -> None:
    """Requires keys `[batch, sequence]`, those of the tokens of x `[batch, sequence, …]`."""
    fits = len(keys.shape) == 2 if x is None else keys.shape == x.shape[:2]
    require(keys.dtype == "int64" and fits, op, "wants a key for each token")


def require_choices(op: Op, experts: Value, logits: Value | None = None) -> None:
    """Requires experts `[batch, sequence, k]`, those of the tokens of `logits` `[batch, sequence, experts]`."""
    fits = len(experts.shape) == 3 if logits is None else experts.shape[:-1] == logits.shape[:-1]
    require(experts.dtype == "int64" and fits, op, "wants experts of each token")


def require_scores(op: Op, scores: Value, what: str = "scores") -> None:
    """Requires floating numbers `[batch, sequence, experts]`."""
    fits = scores.dtype != "int64" and len(scores.shape) == 3 and isinstance(scores.shape[-1], int)
    require(fits, op, f"wants {what} of every expert")
