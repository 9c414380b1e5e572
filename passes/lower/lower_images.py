"""Lowers the patches of a model of images, which replace ids, and the logits of classes."""

from __future__ import annotations

from moec.grammar.spec import Classes, Model, Patches, Windows
from moec.passes.ir import Init, Value
from moec.passes.ir import ops as o
from moec.passes.lower.block_builder import TABLE, Builder, normal


def images_of(patches: Patches) -> Value:
    """The input of `forward`: images in any floating dtype, fp32 in the Program."""
    shape = ("batch", patches.channels, patches.image, patches.image)
    return Value(name="images", shape=shape, dtype="fp32", role="images")


def patch_numbers(b: Builder, model: Model, patches: Patches) -> str:
    """The number of each token in its image, in place of ids."""
    span, has_class_token = patches.span(), model.has_class_token
    return b.one(o.PatchNumbers, "images", to="patches", span=span, size=patches.size, first=has_class_token)


def patch_vectors(b: Builder, model: Model, patches: Patches) -> str:
    """The projected patches `[batch, sequence, dim]`, after a class token if there is one.

    The token starts at zeros, as in the code of Dosovitskiy et al.
    """
    shape = (model.dim, patches.channels, patches.size, patches.size)
    weight = b.parameter("embedding.weight", shape, model.dtype, normal(), patches.span(), matrices=TABLE)
    class_token = {}
    if model.has_class_token:
        assert model.head is not None
        zeros, line = Init(kind="zeros"), model.head.span("pool")
        class_token["first"] = b.parameter("class_token.weight", (model.dim,), model.dtype, zeros, line)
    return b.one(o.PatchEmbed, "images", weight, optional=class_token, to="x", span=patches.span())


def window_numbers(b: Builder, model: Model, windows: Windows, v: str) -> str:
    """The number of each patch's window, from the values v of attention."""
    assert isinstance(model.embedding, Patches), "the language refuses windows of a grid where there is none"
    side = model.embedding.side
    return b.one(o.GridWindows, v, to="windows", span=windows.span(), side=side, size=windows.size, shift=windows.shift)


def class_logits(b: Builder, model: Model, head: Classes, h: str, length: int) -> str:
    """Logits `[batch, classes]` of the mean of the normed patches h, or of the class token before them."""
    span = head.span()
    if head.pool == "first":
        pooled = b.one(o.FirstToken, h, to="first", span=head.span("pool"))
    else:
        pooled = b.one(o.MeanTokens, h, to="mean", span=span, length=length)
    weight = b.parameter("head.weight", (head.count, model.dim), model.dtype, normal(), span, matrices=TABLE)
    bias = b.parameter("head.bias", (head.count,), model.dtype, Init(kind="zeros"), span)
    return b.one(o.Classify, pooled, weight, bias, to="logits", span=span)
