"""The operators that a plan's graphs may name, and the arguments that they may be given.

All are pure: none opens a file, draws a number or writes its inputs. A signature lists exactly the arguments that moec
gives, by kind; tests hold them against torch's own schemas. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from moec.codegen.graph import Arg, DTypeLiteral, Ref

GETITEM = "getitem"
"""Takes one result of an operator that has several."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Kinds of the positional arguments, and of the keyword arguments, which may be left out."""

    positional: tuple[str, ...]
    keywords: Mapping[str, str] = field(default_factory=dict)


def _takes(positional: str, **keywords: str) -> Signature:
    return Signature(tuple(positional.split()), keywords)


ATEN = {
    "aten.add.Tensor": _takes("tensor tensor"),
    "aten.amax.default": _takes("tensor ints"),
    "aten.clamp_min.default": _takes("tensor int"),
    "aten.cross_entropy_loss.default": _takes("tensor tensor none int int float"),
    "aten.cumsum.default": _takes("tensor int"),
    "aten.detach.default": _takes("tensor"),
    "aten.div.Tensor": _takes("tensor tensor"),
    "aten.exp.default": _takes("tensor"),
    "aten.flatten.using_ints": _takes("tensor int int"),
    "aten.gelu.default": _takes("tensor"),
    "aten.layer_norm.default": _takes("tensor ints tensor tensor_or_none float"),
    "aten.linear.default": _takes("tensor tensor"),
    "aten.log.default": _takes("tensor"),
    "aten.logsumexp.default": _takes("tensor ints"),
    "aten.mul.Scalar": _takes("tensor float"),
    "aten.mul.Tensor": _takes("tensor tensor"),
    "aten.narrow.default": _takes("tensor int int int"),
    "aten.ne.Scalar": _takes("tensor int"),
    "aten.ones_like.default": _takes("tensor"),
    "aten.relu.default": _takes("tensor"),
    "aten.repeat_interleave.self_int": _takes("tensor int int"),
    "aten.rms_norm.default": _takes("tensor ints tensor float"),
    "aten.scaled_dot_product_attention.default": _takes("tensor tensor tensor none float bool", enable_gqa="bool"),
    "aten.sigmoid.default": _takes("tensor"),
    "aten.softmax.int": _takes("tensor int"),
    "aten.square.default": _takes("tensor"),
    "aten.squeeze.dim": _takes("tensor int"),
    "aten.sub.Scalar": _takes("tensor int"),
    "aten.sub.Tensor": _takes("tensor tensor"),
    "aten.sum.default": _takes("tensor"),
    "aten.sum.dim_IntList": _takes("tensor ints"),
    "aten.to.dtype": _takes("tensor dtype"),
    "aten.transpose.int": _takes("tensor int int"),
    "aten.unflatten.int": _takes("tensor int ints"),
    "aten.unsqueeze.default": _takes("tensor int"),
    "aten.view_as.default": _takes("tensor tensor"),
    "aten.where.ScalarOther": _takes("tensor tensor int"),
}

COMPUTE = {
    "moec.combine.default": _takes("tensor tensor tensor"),
    "moec.combine_padded.default": _takes("tensor tensor tensor"),
    "moec.count_choices.default": _takes("tensor int int"),
    "moec.count_queues.default": _takes("tensor int"),
    "moec.embed.default": _takes("tensor tensor"),
    "moec.even_counts.default": _takes("tensor"),
    "moec.expert_mlp.default": _takes(
        "tensor tensor tensor tensor tensor_or_none tensor_or_none activation tensor_or_none"
    ),
    "moec.geglu.default": _takes("tensor"),
    "moec.keep_choices.default": _takes("tensor tensor int int int int int"),
    "moec.mixture_mlp.default": _takes("tensor tensor tensor tensor tensor tensor_or_none tensor_or_none activation"),
    "moec.permute.default": _takes("tensor tensor int", some_are_none="bool"),
    "moec.layer_norm.default": _takes("tensor tensor tensor_or_none float"),
    "moec.largest_load.default": _takes("tensor int"),
    "moec.permute_dynamic.default": _takes("tensor tensor tensor int"),
    "moec.permute_padded.default": _takes("tensor tensor tensor int int int int int"),
    "moec.permute_weights.default": _takes("tensor tensor tensor"),
    "moec.queue_starts.default": _takes("tensor int"),
    "moec.rope.default": _takes("tensor float"),
    "moec.route.default": _takes("tensor int score bool bool"),
    "moec.sum_rows.default": _takes("tensor tensor tensor"),
    "moec.swiglu.default": _takes("tensor"),
    "moec.switch_loss.default": _takes("tensor tensor"),
}

CONVERSIONS = {
    "moec.all_gather.default": _takes("tensor int group"),
    "moec.all_gather_alike.default": _takes("tensor int group"),
    "moec.all_reduce.default": _takes("tensor group"),
    "moec.all_reduce_max.default": _takes("tensor group"),
    "moec.all_to_all.default": _takes("tensor tensor group bool"),
    "moec.all_to_all_padded.default": _takes("tensor int int group"),
    "moec.copy_to.default": _takes("tensor group"),
    "moec.exchange_counts.default": _takes("tensor group"),
    "moec.reduce_scatter.default": _takes("tensor int group"),
    "moec.slice.default": _takes("tensor int group"),
}
"""What takes its first operand to another layout; the value stays the same."""

POSITIONED = {
    "moec.embed_part.default": _takes("tensor tensor group"),
    "moec.label_logit.default": _takes("tensor tensor group"),
}
"""What depends on a rank's place in a group, and communicates nothing."""

SIGNATURES: Mapping[str, Signature] = {**ATEN, **COMPUTE, **CONVERSIONS, **POSITIONED, GETITEM: _takes("tensor int")}

WORDS = {"score": ("softmax", "sigmoid"), "activation": ("swiglu", "geglu", "gelu", "relu", "relu2")}
"""Arguments that are one of a few words."""


def argument_complaint(
    target: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg], groups: Collection[str]
) -> str | None:
    """What is wrong with a call of `target`, or None. `groups` are the names that a collective may run over."""
    signature = SIGNATURES.get(target)
    if signature is None:
        return f"names the operator {target!r}, which plans may not"
    if len(args) != len(signature.positional):
        return f"gives {target} {len(args)} arguments, not {len(signature.positional)}"
    if not kwargs.keys() <= signature.keywords.keys():
        return f"gives {target} an argument it does not take"
    given = [*zip(signature.positional, args, strict=True), *((signature.keywords[k], a) for k, a in kwargs.items())]
    for kind, arg in given:
        if not _fits(kind, arg, groups):
            return f"gives {target} something that is no {kind}"
    return None


def _fits(kind: str, arg: Arg, groups: Collection[str]) -> bool:
    match arg:
        case Ref():
            return kind in ("tensor", "tensor_or_none")
        case DTypeLiteral():
            return kind == "dtype"
        case None:
            return kind in ("none", "tensor_or_none")
        case bool():
            return kind == "bool"
        case int():
            return kind == "int" and abs(arg) < 2**63
        case float():
            return kind == "float" and math.isfinite(arg)
        case tuple():
            return kind == "ints" and all(abs(i) < 2**63 for i in arg)
        case str():
            return arg in groups if kind == "group" else arg in WORDS.get(kind, ())
