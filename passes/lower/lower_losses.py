"""Lowers the blocks beside `forward`: the loss, the mean of the balance terms, and the counts that divide them."""

from __future__ import annotations

from typing import Any

from moec.grammar.source import Span
from moec.grammar.spec import Model, Patches
from moec.passes.ir import Block, Op, Output, Role, Value
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.lower_images import images_of, patch_numbers

TOKENS = ("batch", "sequence")


def token_input(role: Role) -> Value:
    """An input with one whole number per token, such as ids or labels. Its name is its role."""
    return Value(name=role, shape=TOKENS, dtype="int64", role=role)


def input_of(model: Model) -> Value:
    """The first input of `forward`: ids of tokens, or images."""
    return images_of(model.embedding) if isinstance(model.embedding, Patches) else token_input("tokens")


def loss_blocks(model: Model) -> list[Block]:
    """The cross-entropy over labels.

    A separate block counts the valid labels, so that several micro-batches can use one count.
    """
    labelled = TOKENS[:1] if isinstance(model.embedding, Patches) else TOKENS  # images have one label each
    labels = Value(name="labels", shape=labelled, dtype="int64", role="labels")
    logits = Value(name="logits", shape=(*labelled, model.outputs), dtype=model.dtype, role="logits")
    span = model.span()
    count = _count_block("valid_labels", labels, o.CountLabels, "valid", span, valid_only=True)
    b = Builder("loss", [logits, labels, Value(name="valid", shape=(), dtype="int64", role="valid")], span)
    nll = b.one(o.CrossEntropy, "logits", "labels", to="nll")
    return [count, b.block([Output(b.one(o.Mean, nll, "valid", to="loss"), "loss")], final=True)]


def balance_blocks_of_tokens(model: Model) -> list[Block]:
    """The balance terms over the tokens of all ranks, counted as ids or patches, padding left out."""
    tokens, padding = input_of(model), model.embedding.padding
    if isinstance(model.embedding, Patches):
        b = Builder("num_tokens", [tokens], model.embedding.span())
        numbers = patch_numbers(b, model, model.embedding)
        patches = b.one(o.CountLabels, numbers, to="count", valid_only=False)
        count = b.block([Output(patches, "num_tokens")], final=True)
    elif padding == "given":
        span = model.embedding.span("padding")
        count = _count_block("num_tokens", token_input("real"), o.CountRealTokens, "num_tokens", span, padding=0)
    elif padding is None:
        count = _count_block("num_tokens", tokens, o.CountLabels, "num_tokens", model.span(), valid_only=False)
    else:
        span = model.embedding.span("padding")
        count = _count_block("num_tokens", tokens, o.CountRealTokens, "num_tokens", span, padding=padding)
    return [count, _aux_loss_block(model.span())]


def balance_blocks_of_vectors(x: Value, span: Span | None) -> list[Block]:
    """The balance terms over the tokens of all ranks, which are counted as vectors `x` `[batch, sequence, dim]`."""
    return [_count_block("num_tokens", x, o.CountTokens, "num_tokens", span), _aux_loss_block(span)]


def _aux_loss_block(span: Span | None) -> Block:
    balance = Value(name="balance", shape=(), dtype="fp32", role="balance")
    b = Builder("aux_loss", [balance, Value(name="num_tokens", shape=(), dtype="int64", role="num_tokens")], span)
    return b.block([Output(b.one(o.Mean, "balance", "num_tokens", to="aux_loss"), "loss")], final=True)


def _count_block(name: str, value: Value, op: type[Op], role: Role, span: Span | None, **attributes: Any) -> Block:
    """The block `name`, which counts `value` over all ranks with `op`."""
    b = Builder(name, [value], span)
    return b.block([Output(b.one(op, value.name, to="count", **attributes), role)], final=True)
