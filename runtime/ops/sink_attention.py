"""`sink_attention`: softmax attention in which a learned logit of each head takes a part of the weights (gpt-oss).

PyTorch's fused attention does the work. With scores s, their log of sums l and a sink z, weights are
`exp(s − l')` with `l' = log(exp(l) + exp(z))`, so the result is attention times `exp(l − l')`. Backward of fused
attention computes weights from the log of sums and sums from the result: given l' and the result with the sink, it
computes the gradients of attention with a sink. That of z is `−Σ exp(z − l') · (grad · result)`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.ops.registry import check, define, differentiate

__all__ = ["attend_to_sink_token", "sink_attention"]

aten = torch.ops.aten


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float) -> None:
    check(q.dim() == 4, lambda: f"moec::sink_attention: q must be [B, S, H, head dim], not {list(q.shape)}")
    check(
        k.shape == v.shape and k.dim() == 4 and k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3],
        lambda: f"moec::sink_attention: k and v must be [B, S, KV, head dim], not {list(k.shape)} and {list(v.shape)}",
    )
    check(q.shape[2] % k.shape[2] == 0, lambda: f"moec::sink_attention: {k.shape[2]} kv heads for {q.shape[2]} heads")
    check(sinks.shape == q.shape[2:3], lambda: f"moec::sink_attention: sinks must be [H], not {list(sinks.shape)}")
    check(scale > 0, lambda: f"moec::sink_attention: the scale must be positive, not {scale}")
    check(
        mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and not causal),
        lambda: "moec::sink_attention: the mask must be boolean, [B or 1, 1, S, S], and say what is causal",
    )


def _check_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    mask: Tensor | None,
    attended: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
) -> None:
    _check(q, k, v, sinks, mask, causal, scale)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    batch, sequence, heads, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(batch, heads, sequence, dtype=dtype)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), sinks.new_empty(sinks.shape)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if q.device.type != "cpu":
        logsumexp = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
        return attend_to_sink_token(q, k, v, sinks, mask, causal, scale).contiguous(), logsumexp
    heads = (x.transpose(1, 2) for x in (q, k, v))
    attended, sums = aten._scaled_dot_product_flash_attention_for_cpu(
        *heads, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale
    )
    logsumexp = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None]).contiguous()
    attended = attended * torch.exp(sums - logsumexp)[..., None].to(q.dtype)
    return attended.transpose(1, 2).contiguous(), logsumexp


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    mask: Tensor | None,
    attended: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    if q.device.type != "cpu":
        given = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
        with torch.enable_grad():
            again = attend_to_sink_token(given[0], given[1], given[2], given[3], mask, causal, scale)
        return tuple(x.contiguous() for x in torch.autograd.grad(again, given, grad))
    heads = (x.transpose(1, 2) for x in (grad, q, k, v, attended))
    of_heads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads, logsumexp, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale
    )
    weights = torch.exp(sinks.to(logsumexp.dtype)[:, None] - logsumexp)
    sums = (grad.to(logsumexp.dtype) * attended).sum(-1).transpose(1, 2)
    of_sinks = -(weights * sums).sum((0, 2)).to(sinks.dtype)
    return *(x.transpose(1, 2).contiguous() for x in of_heads), of_sinks


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as what is added to scores: 0 or −inf."""
    return None if mask is None else torch.zeros((), dtype=dtype).masked_fill(~mask, float("-inf"))


def attend_to_sink_token(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """The same by public, differentiable attention, for devices whose fused kernels give no log of sums alike.

    A first token, which every token sees, has value 0 and score z: one more dim holds z / scale in queries, 1 in its
    key, and 0 in other keys. Seven more zeros keep rows aligned.
    """
    batch, sequence, heads, width = q.shape
    more = q.new_zeros(batch, sequence, heads, 7)
    of_sink = (sinks / scale)[None, None, :, None].expand(batch, sequence, heads, 1)
    q = F.pad(torch.cat([q, of_sink.to(q.dtype), more], -1), (0, 0, 0, 0, 1, 0))
    key = F.pad(k.new_ones(batch, 1, k.shape[2], 1), (width, 7))
    k = torch.cat([key, F.pad(k, (0, 8))], 1)
    v = F.pad(v, (0, 8, 0, 0, 1, 0))
    mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return attended.transpose(1, 2)[:, 1:, :, :width]


sink_attention = define(
    "sink_attention(Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor? mask, bool causal, float scale)"
    " -> (Tensor attended, Tensor logsumexp)",
    fake=_fake,
    check=_check,
    kernel=_attend,
)
sink_attention_backward = define(
    "sink_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor? mask, Tensor attended,"
    " Tensor logsumexp, bool causal, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    check=_check_backward,
    kernel=_attend_backward,
)
"""q [B, S, H, head dim], k and v [B, S, KV, head dim], sinks [H], mask bool [B or 1, 1, S, S] -> attended, like q.

Any floating dtype. `logsumexp` [B, H, S], in at least float32, is for backward; it is zeros where backward computes
attention again.
"""


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*given, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    gradients = sink_attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *gradients, None, None, None


differentiate(sink_attention, setup=_setup, backward=_differentiate)
