"""Finds mistakes in a model's first batch: labels that are not the next tokens, and tokens `[sequence, batch]`.

Other libraries' models shift labels inside (`labels=input_ids` of Hugging Face's); moec's take the next token of each.
"""

from __future__ import annotations

from torch import Tensor

from moec.passes.ir import Program
from moec.passes.ir.ops import Attention
from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.guards.guard import BatchAgreed, Guard
from moec.runtime.script import warn_first

SHIFTED = {
    0: "the labels of job.step are its tokens: the model would learn to repeat the token that it sees; moec does not "
    "shift labels, so give `ids[:, :-1]` as tokens and `ids[:, 1:]` as labels",
    2: "the labels of job.step are the tokens after the next ones, as if shifted twice: moec does not shift labels, so "
    "give `ids[:, :-1]` as tokens and `ids[:, 1:]` as labels",
}
"""The warning, by shift: valid labels equal the tokens this many places on, where 1 is right."""


def warn_of_batch(step: BatchAgreed) -> None:
    """Warns of labels shifted otherwise than by one, and of `[sequence, batch]`."""
    model, tokens, labels = step.model, step.tokens, step.labels
    if model.spec.train is not None:
        batch, sequence = model.spec.train.batch // step.data_size, model.spec.train.sequence
        if (sequence, batch) == tokens.shape != (batch, sequence):
            warn_first(
                f"tokens of job.step are {list(tokens.shape)}, and the file's batch is {batch} sequences of {sequence} "
                "tokens for each data rank: give `[batch, sequence]`, such as `tokens.t()`"
            )
    if is_causal(model.program) and not are_tokens(labels, tokens, 1, least=0):
        for shift, message in SHIFTED.items():
            if are_tokens(labels, tokens, shift, least=2):
                warn_first(message)
                break


def is_causal(program: Program) -> bool:
    """Whether the model has attention, all of it causal."""
    attentions = [op for block in program.blocks for op in block.ops if isinstance(op, Attention)]
    return bool(attentions) and all(op.causal for op in attentions)


def are_tokens(labels: Tensor, tokens: Tensor, shift: int, least: int) -> bool:
    """Whether valid labels equal the tokens `shift` places on; False if fewer than `least` labels have such a token."""
    if labels.shape != tokens.shape:
        return False
    labels = labels[:, : max(0, labels.shape[1] - shift)]
    valid = labels != IGNORED_LABEL
    return int(valid.sum()) >= least and bool((labels == tokens[:, shift:])[valid].all())


GUARD = Guard(event=BatchAgreed, look=warn_of_batch, when=lambda step: not step.custom, once="first batch")
