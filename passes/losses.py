"""Lowers the blocks beside `forward`: the loss, the mean of the balance terms, and the counts they divide by."""

from __future__ import annotations

from typing import Any

from moec.grammar.source import Span
from moec.grammar.spec import Model
from moec.passes.builder import Builder
from moec.passes.ir import Block, Op, Value
from moec.passes.ir import ops as o

TOKENS = ("batch", "sequence")


def loss_blocks(model: Model) -> list[Block]:
    """The cross-entropy over labels.

    A block of its own counts the valid labels, so that micro-batches can share one count.
    """
    labels = Value(name="labels", shape=TOKENS, dtype="int64")
    logits = Value(name="logits", shape=(*TOKENS, model.vocab), dtype=model.dtype)
    span = model.span()
    count = _count_block("valid_labels", labels, o.CountLabels, span, valid_only=True)
    b = Builder("loss", [logits, labels, Value(name="valid", shape=(), dtype="int64")], span)
    nll = b.one(o.CrossEntropy, "logits", "labels", to="nll")
    return [count, b.block([b.one(o.Mean, nll, "valid", to="loss")], final=True)]


def balance_blocks_of_tokens(model: Model) -> list[Block]:
    """The balance terms over the tokens of all ranks, counted as ids `[batch, sequence]`, padding left out."""
    tokens, padding = Value(name="tokens", shape=TOKENS, dtype="int64"), model.embedding.padding
    if padding is None:
        count = _count_block("num_tokens", tokens, o.CountLabels, model.span(), valid_only=False)
    else:
        span = model.embedding.span("padding")
        count = _count_block("num_tokens", tokens, o.CountRealTokens, span, padding=padding)
    return [count, _aux_loss_block(model.span())]


def balance_blocks_of_vectors(x: Value, span: Span | None) -> list[Block]:
    """The balance terms over the tokens of all ranks, which are counted as vectors `x` `[batch, sequence, dim]`."""
    return [_count_block("num_tokens", x, o.CountTokens, span), _aux_loss_block(span)]


def _aux_loss_block(span: Span | None) -> Block:
    balance = Value(name="balance", shape=(), dtype="fp32")
    b = Builder("aux_loss", [balance, Value(name="num_tokens", shape=(), dtype="int64")], span)
    return b.block([b.one(o.Mean, "balance", "num_tokens", to="aux_loss")], final=True)


def _count_block(name: str, counted: Value, op: type[Op], span: Span | None, **attributes: Any) -> Block:
    """The block called `name`: how many of `counted` there are on all ranks."""
    b = Builder(name, [counted], span)
    return b.block([b.one(op, counted.name, to="count", **attributes)], final=True)
