"""`masked_attention`: softmax attention with windows, sinks and packed texts, in blocks of rows, by PyTorch's fused
attention.

A block of rows attends to the keys that its window and (on CPU) its texts reach, under a mask of the block alone: work
and memory grow with sequence times window or text. On GPUs a block has every key where there is no window.

A sink is a learned logit z of a head that takes a part of the weights (gpt-oss). With scores s and their logsumexp l,
weights are `exp(s − l')` with `l' = log(exp(l) + exp(z))`, so the result is attention times `exp(l − l')`. Backward of
fused attention computes weights from the logsumexp, and the sums of gradient times result from the result: given l' and
the result with the sink, it computes the gradients of attention with a sink. That of z is
`−Σ exp(z − l') · (grad · result)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.ops import compositions
from moec.runtime.ops.registry import check, define, differentiate

__all__ = ["added_mask", "attend", "attend_in_public", "masked_attention", "with_sink_token"]

aten = torch.ops.aten

ROWS = 256
"""Rows of a block, or as many as the window has: with a window a block has at most twice as many keys as rows, three
times without `causal`."""


class Mask(NamedTuple):
    """Which keys a row sees: of its segment and kind (`segments` and `real` int64 [B, S]), up to itself if `causal`,
    less than `window` away, 0 for any distance. `ascending`: segments are known not to descend, looked at on CPU alone.
    """

    segments: Tensor | None
    real: Tensor | None
    causal: bool
    window: int
    ascending: bool = False

    @classmethod
    def seen(cls, segments: Tensor | None, real: Tensor | None, causal: bool, window: int) -> Mask:
        """The mask of a batch. Sequences of one text each need no segments."""
        ascending = segments is not None and segments.device.type == "cpu" and bool((segments.diff(dim=1) >= 0).all())
        if ascending and segments is not None and torch.equal(segments[:, :1], segments[:, -1:]):
            segments = None
        return cls(segments, real, causal, window, ascending)

    def blocks(self, sequence: int) -> Iterator[tuple[slice, slice]]:
        """Rows and the keys that they reach; one block where no mask is needed beside `causal`."""
        if not self.window and self.segments is None and self.real is None:
            yield slice(0, sequence), slice(0, sequence)
            return
        size = max(ROWS, self.window)
        starts = range(0, sequence, size)
        ends = [min(start + size, sequence) for start in starts]
        for start, end, begun, over in zip(starts, ends, *self._texts(starts, ends), strict=True):
            first = max(start - self.window + 1, begun) if self.window else begun
            after = min(end + self.window - 1, over) if self.window else over
            yield slice(start, end), slice(first, end if self.causal else after)

    def _texts(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where the first text of each block begins, and where its last one is over, in any sequence of the batch."""
        segments = self.segments
        if segments is None or not self.ascending or not segments.numel():
            return [0] * len(starts), [*ends[-1:]] * len(starts)
        lasts = [end - 1 for end in ends]
        begun = torch.searchsorted(segments, segments[:, starts].contiguous()).amin(0)
        over = torch.searchsorted(segments, segments[:, lasts].contiguous(), right=True).amax(0)
        return begun.tolist(), over.tolist()

    def of(self, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
        """A block's mask, bool [B or 1, 1, rows, keys]; None where no mask is needed beside `causal`."""
        if not self.window and self.segments is None and self.real is None:
            return None
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)[None]
        earlier = j <= i if self.causal else torch.ones_like(j, dtype=torch.bool)
        mask = earlier.expand(i.shape[0], j.shape[1])[None, None]
        if self.window:
            mask = mask & ((i - j).abs() < self.window)
        for numbers in (self.segments, self.real):
            if numbers is not None:
                mask = mask & (numbers[:, None, rows, None] == numbers[:, None, None, keys])
        return mask


def _check(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor | None, real: Tensor | None,
    causal: bool, window: int, scale: float,
) -> None:  # fmt: skip
    check(q.dim() == 4, lambda: f"moec::masked_attention: q must be [B, S, H, head dim], not {list(q.shape)}")
    check(
        k.shape == v.shape and k.dim() == 4 and k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3],
        lambda: f"moec::masked_attention: k and v must be [B, S, KV, head dim]: {list(k.shape)}, {list(v.shape)}",
    )
    check(q.shape[2] % k.shape[2] == 0, lambda: f"moec::masked_attention: {k.shape[2]} kv heads for {q.shape[2]} heads")
    check(
        sinks is None or sinks.shape == q.shape[2:3],
        lambda: f"moec::masked_attention: sinks must be [H], not {sinks}",
    )
    for numbers in (segments, real):
        check(
            numbers is None or (numbers.shape == q.shape[:2] and numbers.dtype == torch.int64),
            lambda: f"moec::masked_attention: segments and real must be int64 {list(q.shape[:2])}",
        )
    check(window >= 0, lambda: f"moec::masked_attention: the window must not be negative: {window}")
    check(scale > 0, lambda: f"moec::masked_attention: the scale must be positive, not {scale}")


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, sequence, heads, _width = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(batch, heads, sequence, dtype=dtype)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor | None, real: Tensor | None,
    causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results of `masked_attention`."""
    seen = Mask.seen(segments, real, causal, window)
    attended, logsumexp = _fake(q)
    if q.device.type != "cpu":
        return attend_in_public(q, k, v, sinks, seen, scale).contiguous(), logsumexp.zero_()
    for rows, keys in seen.blocks(q.shape[1]):
        mask = seen.of(rows, keys, q.device)
        heads = (x.transpose(1, 2) for x in (q[:, rows], k[:, keys], v[:, keys]))
        part, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, causal and mask is None, attn_mask=added_mask(mask, q.dtype), scale=scale
        )
        if sinks is not None:
            with_sink = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
            part, sums = part * torch.exp(sums - with_sink)[..., None].to(q.dtype), with_sink
        attended[:, rows], logsumexp[:, :, rows] = part.transpose(1, 2), sums
    return attended, logsumexp


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor | None, real: Tensor | None,
    attended: Tensor, logsumexp: Tensor, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    seen, wide = Mask.seen(segments, real, causal, window), logsumexp.dtype
    if q.device.type != "cpu":
        return _backward_in_public(grad, q, k, v, sinks, seen, scale)
    of_q, of_k, of_v = torch.empty_like(q), *(torch.zeros(x.shape, dtype=wide) for x in (k, v))
    for rows, keys in seen.blocks(q.shape[1]):
        mask = seen.of(rows, keys, q.device)
        parts = grad[:, rows], q[:, rows], k[:, keys], v[:, keys], attended[:, rows]
        heads = (x.transpose(1, 2) for x in parts)
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, logsumexp[:, :, rows].contiguous(), 0.0, causal and mask is None,
            attn_mask=added_mask(mask, q.dtype), scale=scale,
        )  # fmt: skip
        in_rows, in_keys, in_values = (x.transpose(1, 2) for x in found)
        of_q[:, rows] = in_rows
        of_k[:, keys] += in_keys
        of_v[:, keys] += in_values
    of_sinks = q.new_empty(0)
    if sinks is not None:
        weights = torch.exp(sinks.to(wide)[:, None] - logsumexp)
        of_sinks = -(weights * (grad.to(wide) * attended).sum(-1).transpose(1, 2)).sum((0, 2)).to(sinks.dtype)
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype), of_sinks


def added_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as what is added to scores: 0 or −inf."""
    return None if mask is None else torch.zeros((), dtype=dtype).masked_fill(~mask, float("-inf"))


def attend_in_public(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seen: Mask, scale: float) -> Tensor:
    """`attend` by `F.scaled_dot_product_attention`, for devices whose fused kernels return another `logsumexp`."""
    parts = [
        with_sink_token(q[:, rows], k[:, keys], v[:, keys], sinks, seen.of(rows, keys, q.device), seen.causal, scale)
        for rows, keys in seen.blocks(q.shape[1])
    ]
    return torch.cat(parts, 1) if parts else q


def with_sink_token(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Attention in which a first token, which every token sees, has value 0 and score z.

    One more dim holds z / scale in queries, or three dims parts of a z that is wider than queries; these dims are 1 in
    the token's key, and 0 in other keys. Zeros up to eight dims keep rows aligned. Queries get a first row too, so that
    `causal` fits; it is dropped at the end.
    """
    batch, rows, heads, width = q.shape
    if sinks is not None:
        parts = torch.stack(in_parts(sinks / scale, q.dtype), -1).expand(batch, rows, heads, -1)
        q = F.pad(torch.cat([q, parts], -1), (0, 8 - parts.shape[-1], 0, 0, 1, 0))
        key = F.pad(k.new_ones(batch, 1, k.shape[2], parts.shape[-1]), (width, 8 - parts.shape[-1]))
        k = torch.cat([key, F.pad(k, (0, 8))], 1)
        v = F.pad(v, (0, 8, 0, 0, 1, 0))
        mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return attended.transpose(1, 2)[:, attended.shape[2] - rows :, :, :width]


def in_parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of `dtype` whose sum is x: one, or three of 16 bits for an x of fp32. The first has the gradient of x."""
    found = [x.to(dtype)]
    while len(found) < 3 and torch.promote_types(x.dtype, dtype) != dtype:
        found.append((x - sum(part.to(x.dtype) for part in found)).detach().to(dtype))
    return found


def _backward_in_public(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seen: Mask, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = [x.detach().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    # Operators run below autograd under a dispatch mode, such as torch's FlopCounterMode: this lets them record again.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        again = attend_in_public(given[0], given[1], given[2], given[3] if len(given) > 3 else None, seen, scale)
        of_q, of_k, of_v, *of_sinks = (x.contiguous() for x in torch.autograd.grad(again, given, grad))
    return of_q, of_k, of_v, of_sinks[0] if of_sinks else q.new_empty(0)


_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? segments, Tensor? real"
_HOW = "bool causal, int window, float scale"
masked_attention = define(
    f"masked_attention({_GIVEN}, {_HOW}) -> (Tensor attended, Tensor logsumexp)",
    fake=_fake,
    check=_check,
    kernel=attend,
)
"""q [B, S, H, head dim], k and v [B, S, KV, head dim], sinks [H], segments and real int64 [B, S] -> attended, like q.

Any floating dtype. `Mask` says what a row sees. `logsumexp` [B, H, S], in at least float32, is for backward; it is
zeros where backward computes attention again.
"""
masked_attention_backward = define(
    f"masked_attention_backward(Tensor grad, {_GIVEN}, Tensor attended, Tensor logsumexp, {_HOW})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    check=lambda grad, q, k, v, sinks, segments, real, attended, logsumexp, *how: _check(
        q, k, v, sinks, segments, real, *how
    ),
    kernel=_attend_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, causal, window, scale = inputs
    ctx.how = causal, window, scale
    ctx.save_for_backward(*given, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _compose(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Tensor]:
    q, k, v, sinks, segments, real, causal, window, scale = inputs
    whole = slice(0, q.shape[1])
    mask = Mask(segments, real, causal, window or q.shape[1]).of(whole, whole, q.device)
    return (compositions.attended(q, k, v, sinks, mask, scale),)


def _given(ctx: Any, *_: Any) -> tuple[tuple[Any, ...], tuple[()]]:
    *inputs, _, _ = ctx.saved_tensors
    return (*inputs, *ctx.how), ()


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    saved = ctx.saved_tensors  # once: recomputation unpacks each of them once
    of_q, of_k, of_v, of_sinks = masked_attention_backward(grad, *saved, *ctx.how)
    return of_q, of_k, of_v, None if saved[3] is None else of_sinks, *(None,) * 5


differentiate(masked_attention, setup=_setup, backward=_differentiate, composition=_compose, given=_given)
