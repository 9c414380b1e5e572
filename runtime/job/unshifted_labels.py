"""Finds labels that are the tokens themselves, from which a causal model learns to repeat its input.

Other libraries' models shift labels inside (`labels=input_ids` of Hugging Face's); moec's take the next token of each.
"""

from __future__ import annotations

from torch import Tensor

from moec.passes.ir import Program
from moec.passes.ir.ops import Attention
from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.job.module import PlanModule
from moec.runtime.script import warn_first


def warn_of_unshifted(model: PlanModule, tokens: Tensor, labels: Tensor) -> None:
    """Warns once per model if, in its first step, each valid label is the token at its place.

    Reads values, which on a GPU waits for it: in that step alone.
    """
    if "unshifted labels" in model.seen:
        return
    model.seen.add("unshifted labels")
    if is_causal(model.program) and are_tokens(labels, tokens):
        warn_first(
            "the labels of job.step are its tokens: the model would learn to repeat the token that it sees; moec does "
            "not shift labels, so give `ids[:, :-1]` as tokens and `ids[:, 1:]` as labels",
        )


def is_causal(program: Program) -> bool:
    """Whether the model has attention, all of it causal."""
    attentions = [op for block in program.blocks for op in block.ops if isinstance(op, Attention)]
    return bool(attentions) and all(op.causal for op in attentions)


def are_tokens(labels: Tensor, tokens: Tensor) -> bool:
    """Whether each valid label equals its token, and not the next token too, as in a text of one repeated token."""
    if labels.shape != tokens.shape or labels.shape[-1] < 2:
        return False
    valid = labels != IGNORED_LABEL
    if int(valid.sum()) < 2 or not bool((labels == tokens)[valid].all()):
        return False
    return not bool((labels[:, :-1] == tokens[:, 1:])[valid[:, :-1]].all())
