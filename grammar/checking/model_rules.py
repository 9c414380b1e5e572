"""Rules of `model { … }`: forms of a layer that do not go together."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, labels_at
from moec.grammar.spec import LayerModule, Moa, Model, Moe, Patches, Spec


def model_forms(spec: Spec) -> Iterator[Diagnostic]:
    """Every rule of the file's model, if it has one."""
    for part in (*((spec.model,) if spec.has_model else ()), *spec.layers):
        yield from _rounded_routers(part)
    if spec.has_model:
        yield from _parallel_residual(spec.model)
        yield from _images(spec)
        yield from _windows(spec.model)
        yield from _kept_in_fp32(spec.model)
    if (
        spec.train is not None
        and spec.train.sequence is None
        and not (spec.has_model and spec.model.length is not None)
    ):
        yield diagnose("MOE0203", spec.train.span(), "`train` needs `sequence`")


def _kept_in_fp32(model: Model) -> Iterator[Diagnostic]:
    """The model has what it keeps."""
    for part in dict.fromkeys(model.keep_in_fp32):
        if not model.has(part):
            yield diagnose("MOE0342", model.span("keep_in_fp32"), f"no layer has {part}", help=f"leave `{part}` out")


def _rounded_routers(part: Model | LayerModule) -> Iterator[Diagnostic]:
    """Logits are of `dtype` only where the routers' weights are."""
    if part.router_dtype == "model" and "routers" in part.keep_in_fp32:
        at, place = part.span("router_dtype"), part.span("keep_in_fp32")
        labels = labels_at((place, "this keeps their weights, and so their logits, in fp32"))
        message, help = "`router_dtype = model` has no effect on logits", "leave one of the two out"
        yield diagnose("MOE0374", at, message, labels=labels, help=help, severity=Severity.WARNING)


def _parallel_residual(model: Model) -> Iterator[Diagnostic]:
    """Attention and feed-forward side by side share one sum: norms after a sublayer have no defined place."""
    if model.parallel_residual == "none" or model.norm_place == "pre":
        return
    at, place = model.span("parallel_residual"), model.span("norm_place")
    yield diagnose(
        "MOE0365",
        at,
        "attention and the feed-forward are added in one sum",
        labels=labels_at((place, "these norms come after each of them")),
        help="set `norm_place = pre`, or leave `parallel_residual` out",
    )


def _images(spec: Spec) -> Iterator[Diagnostic]:
    """Images and tokens have words of their own; an image's grid fixes the length of its sequence."""
    model, embedding = spec.model, spec.model.embedding
    if not isinstance(embedding, Patches):
        yield from _tokens(spec)
        return
    here = labels_at((embedding.span(), "the model takes images"))
    if embedding.image % embedding.size:
        over = embedding.image % embedding.size
        yield diagnose(
            "MOE0366",
            embedding.span("size"),
            f"{embedding.image} / {embedding.size} leaves {over} pixels over",
            labels=labels_at((embedding.span("image"), f"images are {embedding.image} pixels wide")),
            help="crop or pad the images, or take a size that divides them",
        )
        return
    if model.vocab is not None:
        yield diagnose("MOE0367", model.span("vocab"), "a patch has no id", labels=here, help="leave `vocab` out")
    if model.head is None:
        help = "give the number of classes: `head = classes(10)`"
        yield diagnose("MOE0367", embedding.span(), "the scores of an image's next token are not defined", help=help)
    gates = [
        node.gate for layer in model.layers for node in (layer.moe, layer.attention) if isinstance(node, Moe | Moa)
    ]
    for gate in dict.fromkeys(gates):
        if "tokens" in gate.inputs():
            help = "`topk` chooses by the patch's vector"
            message = f"`{gate.word}` chooses by ids, and a patch has none"
            yield diagnose("MOE0367", gate.span(), message, labels=here, help=help)
    for attention in {id(layer.attention): layer.attention for layer in model.layers}.values():
        if attention.causal and not attention.given("causal") and attention.grid is None:
            message = "a patch attends to the rows above it and to patches on its left alone: `causal` is true"
            help = "say `causal = false`; or `causal = true`, for this order of patches"
            at = attention.span()
            yield diagnose("MOE0367", at, message, labels=here, help=help, severity=Severity.WARNING)
    more = " with a class token" if model.has_class_token else ""
    grid = f"{embedding.side} x {embedding.side} patches{more} make sequences of {model.length}"
    lengths = [(model.context, model.span("context"))]
    lengths += [(spec.train.sequence, spec.train.span("sequence"))] if spec.train else []
    for length, span in lengths:
        if length not in (None, model.length):
            label, help = labels_at((embedding.span(), grid)), "leave it out: the grid says it"
            yield diagnose("MOE0368", span, f"{length} tokens", labels=label, help=help)


def _windows(model: Model) -> Iterator[Diagnostic]:
    """Windows of a grid: there is one, they divide it, and nothing else says which patches a patch attends to."""
    patches = model.embedding
    for attention in {id(layer.attention): layer.attention for layer in model.layers}.values():
        windows, help = attention.grid, ""
        if windows is None:
            continue
        if not isinstance(patches, Patches):
            at, message, label = windows.span(), "tokens of a text have no grid", labels_at()
        elif attention.causal or attention.window is not None:
            other = "window" if attention.window is not None else "causal"
            at, message = windows.span(), "a patch attends to all patches of its window"
            label = labels_at((attention.span(other), "this leaves some of them out")) if attention.given(other) else []
            message += "" if label else ", and `causal` is true"
        elif patches.side % windows.size:
            at, message = windows.span("size"), f"{patches.side} / {windows.size} is not whole"
            label = labels_at((patches.span(), f"a grid of {patches.side} x {patches.side} patches"))
        elif windows.shift and windows.size == patches.side:
            at, message = windows.span("shift"), f"a shift by {windows.shift} cuts the only window into parts"
            label = labels_at((patches.span(), f"one window has all {patches.side} x {patches.side} patches"))
            help = "leave `shift` out"
        elif windows.shift >= windows.size:
            at, message = windows.span("shift"), f"a shift by {windows.shift} patches"
            label = labels_at((windows.span("size"), f"windows repeat every {windows.size}"))
        elif model.head is not None and model.has_class_token:
            label = labels_at((model.head.span("pool"), "this token stands before the patches"))
            help = "leave `grid` out, or `pool`: the mean of the patches needs no token"
            yield diagnose("MOE0344", windows.span(), "only patches lie in windows", labels=label, help=help)
            continue
        else:
            continue
        yield diagnose("MOE0369", at, message, labels=label, help=help)


def _tokens(spec: Spec) -> Iterator[Diagnostic]:
    """What a file made in Python may lack, and a class head, which is for images."""
    model = spec.model
    if model.vocab is None:
        yield diagnose("MOE0203", model.span(), "`model` needs `vocab`")
    if model.head is not None:
        help = "leave `head` out, or take images: `embedding = patches(image = 32, size = 4)`"
        yield diagnose("MOE0367", model.head.span(), "classes are of images, and this model takes tokens", help=help)
