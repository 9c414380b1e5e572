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

aten = torch.ops.aten

ROWS = 256
"""Rows of a block, or as many as the window has: with a window a block has at most twice as many keys as rows, three
times without `causal`."""


class Mask(NamedTuple):
    """The keys that each row attends to: those of its segment and kind (`segments` and `real` int64 [B, S]), less than
    `window` away (0 for any distance), none after it if `causal`. `ascending`: segments ascend, which only CPUs test.
    """

    segments: Tensor | None
    real: Tensor | None
    causal: bool
    window: int
    ascending: bool = False

    @classmethod
    def of_batch(cls, segments: Tensor | None, real: Tensor | None, causal: bool, window: int) -> Mask:
        """The mask of a batch. Sequences of one text each need no segments."""
        ascending = segments is not None and segments.device.type == "cpu" and bool((segments.diff(dim=1) >= 0).all())
        if ascending and segments is not None and torch.equal(segments[:, :1], segments[:, -1:]):
            segments = None
        return cls(segments, real, causal, window, ascending)

    def blocks(self, sequence: int) -> Iterator[tuple[slice, slice]]:
        """Blocks of rows, with the range of keys that they reach; one block where no mask but `causal` is needed."""
        if not self.window and self.segments is None and self.real is None:
            yield slice(0, sequence), slice(0, sequence)
            return
        size = max(ROWS, self.window)
        starts = range(0, sequence, size)
        ends = [min(start + size, sequence) for start in starts]
        for start, end, text_start, text_end in zip(starts, ends, *self._texts(starts, ends), strict=True):
            first_key = max(start - self.window + 1, text_start) if self.window else text_start
            end_key = min(end + self.window - 1, text_end) if self.window else text_end
            yield slice(start, end), slice(first_key, end if self.causal else end_key)

    def _texts(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[list[int], list[int]]:
        """The first key of each block's first text and the end of its last text, over all sequences of the batch."""
        segments = self.segments
        if segments is None or not self.ascending or not segments.numel():
            return [0] * len(starts), [*ends[-1:]] * len(starts)
        last_rows = [end - 1 for end in ends]
        text_starts = torch.searchsorted(segments, segments[:, starts].contiguous()).amin(0)
        text_ends = torch.searchsorted(segments, segments[:, last_rows].contiguous(), right=True).amax(0)
        return text_starts.tolist(), text_ends.tolist()

    def block(self, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
        """A block's mask, bool [B or 1, 1, rows, keys]; None where no mask but `causal` is needed."""
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
    grad_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_sinks


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor | None, real: Tensor | None,
    causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results of `masked_attention`."""
    mask = Mask.of_batch(segments, real, causal, window)
    attended, logsumexp = _fake(q)
    if q.device.type != "cpu":
        return attend_by_sdpa(q, k, v, sinks, mask, scale).contiguous(), logsumexp.zero_()
    for rows, keys in mask.blocks(q.shape[1]):
        block_mask = mask.block(rows, keys, q.device)
        heads = (x.transpose(1, 2) for x in (q[:, rows], k[:, keys], v[:, keys]))
        part, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, causal and block_mask is None, attn_mask=added_mask(block_mask, q.dtype), scale=scale
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
    mask, wide = Mask.of_batch(segments, real, causal, window), logsumexp.dtype
    if q.device.type != "cpu":
        return _backward_by_sdpa(grad, q, k, v, sinks, mask, scale)
    grad_q, grad_k, grad_v = torch.empty_like(q), *(torch.zeros(x.shape, dtype=wide) for x in (k, v))
    for rows, keys in mask.blocks(q.shape[1]):
        block_mask = mask.block(rows, keys, q.device)
        parts = grad[:, rows], q[:, rows], k[:, keys], v[:, keys], attended[:, rows]
        heads = (x.transpose(1, 2) for x in parts)
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, logsumexp[:, :, rows].contiguous(), 0.0, causal and block_mask is None,
            attn_mask=added_mask(block_mask, q.dtype), scale=scale,
        )  # fmt: skip
        block_q, block_k, block_v = (x.transpose(1, 2) for x in gradients)
        grad_q[:, rows] = block_q
        grad_k[:, keys] += block_k
        grad_v[:, keys] += block_v
    grad_sinks = q.new_empty(0)
    if sinks is not None:
        weights = torch.exp(sinks.to(wide)[:, None] - logsumexp)
        grad_sinks = -(weights * (grad.to(wide) * attended).sum(-1).transpose(1, 2)).sum((0, 2)).to(sinks.dtype)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks


def added_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as the terms that are added to scores: 0 or −inf."""
    return None if mask is None else torch.zeros((), dtype=dtype).masked_fill(~mask, float("-inf"))


def attend_by_sdpa(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Mask, scale: float) -> Tensor:
    """`attend` by `F.scaled_dot_product_attention`, for devices whose fused kernels return another `logsumexp`."""
    parts = [
        with_sink_token(q[:, rows], k[:, keys], v[:, keys], sinks, mask.block(rows, keys, q.device), mask.causal, scale)
        for rows, keys in mask.blocks(q.shape[1])
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
    parts = [x.to(dtype)]
    while len(parts) < 3 and torch.promote_types(x.dtype, dtype) != dtype:
        parts.append((x - sum(part.to(x.dtype) for part in parts)).detach().to(dtype))
    return parts


def _backward_by_sdpa(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Mask, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    # Operators run below autograd under a dispatch mode, such as torch's FlopCounterMode: this lets them record again.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        attended = attend_by_sdpa(leaves[0], leaves[1], leaves[2], leaves[3] if len(leaves) > 3 else None, mask, scale)
        grad_q, grad_k, grad_v, *grad_sinks = (x.contiguous() for x in torch.autograd.grad(attended, leaves, grad))
    return grad_q, grad_k, grad_v, grad_sinks[0] if grad_sinks else q.new_empty(0)


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? segments, Tensor? real"
_ATTRIBUTES = "bool causal, int window, float scale"
masked_attention = define(
    f"masked_attention({_OPERANDS}, {_ATTRIBUTES}) -> (Tensor attended, Tensor logsumexp)",
    fake=_fake,
    check=_check,
    kernel=attend,
)
"""q [B, S, H, head dim], k and v [B, S, KV, head dim], sinks [H], segments and real int64 [B, S] -> attended, like q.

Any floating dtype. `Mask` says what a row sees. `logsumexp` [B, H, S], in at least float32, is for backward; it is
zeros where backward computes attention again.
"""
masked_attention_backward = define(
    f"masked_attention_backward(Tensor grad, {_OPERANDS}, Tensor attended, Tensor logsumexp, {_ATTRIBUTES})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    check=lambda grad, q, k, v, sinks, segments, real, attended, logsumexp, *attributes: _check(
        q, k, v, sinks, segments, real, *attributes
    ),
    kernel=_attend_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *operands, causal, window, scale = inputs
    ctx.attributes = causal, window, scale
    ctx.save_for_backward(*operands, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _compose(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Tensor]:
    q, k, v, sinks, segments, real, causal, window, scale = inputs
    rows = slice(0, q.shape[1])
    mask = Mask(segments, real, causal, window or q.shape[1]).block(rows, rows, q.device)
    return (compositions.attended(q, k, v, sinks, mask, scale),)


def _saved_inputs(ctx: Any, *_: Any) -> tuple[tuple[Any, ...], tuple[()]]:
    *inputs, _, _ = ctx.saved_tensors
    return (*inputs, *ctx.attributes), ()


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    saved = ctx.saved_tensors  # once: recomputation unpacks each of them once
    grad_q, grad_k, grad_v, grad_sinks = masked_attention_backward(grad, *saved, *ctx.attributes)
    return grad_q, grad_k, grad_v, None if saved[3] is None else grad_sinks, *(None,) * 5


differentiate(masked_attention, setup=_setup, backward=_differentiate, composition=_compose, saved_inputs=_saved_inputs)
