"""The operators that a plan's graphs may name. All are pure: none opens a file, draws a number or writes its inputs."""

from __future__ import annotations

GETITEM = "getitem"
"""Takes one result of an operator that has several."""

ATEN = frozenset(
    {
        "aten.add.Tensor",
        "aten.clamp_min.default",
        "aten.cross_entropy_loss.default",
        "aten.div.Tensor",
        "aten.embedding.default",
        "aten.flatten.using_ints",
        "aten.gelu.default",
        "aten.linear.default",
        "aten.logsumexp.default",
        "aten.mul.Scalar",
        "aten.ne.Scalar",
        "aten.ones_like.default",
        "aten.rms_norm.default",
        "aten.scaled_dot_product_attention.default",
        "aten.square.default",
        "aten.squeeze.dim",
        "aten.sum.default",
        "aten.to.dtype",
        "aten.transpose.int",
        "aten.unflatten.int",
    }
)

COMPUTE = frozenset(
    {
        "moec.combine.default",
        "moec.expert_mlp.default",
        "moec.permute.default",
        "moec.rope.default",
        "moec.route.default",
        "moec.swiglu.default",
        "moec.switch_loss.default",
    }
)

COLLECTIVES = frozenset(
    {
        "moec.all_reduce.default",
        "moec.all_to_all.default",
        "moec.exchange_counts.default",
    }
)

ALLOWED = ATEN | COMPUTE | COLLECTIVES | {GETITEM}
