"""`cached_attention` and `turn`: attention and rotary positions of generation, over keys and values of earlier tokens.

A cache has a place for each token of a sequence, in order: a token at place p sees the places 0 to p. Padding at the
end of a prompt is written to its places too; the tokens that come there overwrite it before any token sees it. These
operators have no gradient. `cached_attention` writes to its operands `keys` and `values`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_rope import turned
from moec.runtime.ops.masked_attention import added_mask, attend, with_sink_token
from moec.runtime.ops.registry import check, define

aten = torch.ops.aten


def _check(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor, starts: Tensor | None,
    sinks: Tensor | None, begin: int, end: int, window: int, scale: float,
) -> None:  # fmt: skip
    batch, tokens, heads, width = q.shape
    cached = (batch, k.shape[2], keys.shape[2], width)
    check(
        tuple(keys.shape) == cached and keys.shape == values.shape and k.shape == v.shape,
        lambda: f"moec::cached_attention: caches must be {list(cached)}: {list(keys.shape)}, {list(values.shape)}",
    )
    check(heads % k.shape[2] == 0, lambda: f"moec::cached_attention: {k.shape[2]} kv heads for {heads} heads")
    check(
        places.shape == q.shape[:2] and (starts is None or starts.shape == q.shape[:2]),
        lambda: f"moec::cached_attention: places and starts must be [{batch}, {tokens}], not {list(places.shape)}",
    )
    check(
        begin + tokens <= end <= keys.shape[2],
        lambda: f"moec::cached_attention: {tokens} tokens from {begin} to {end} of {keys.shape[2]} places",
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor, starts: Tensor | None,
    sinks: Tensor | None, begin: int, end: int, window: int, scale: float,
) -> Tensor:  # fmt: skip
    batch, tokens = places.shape
    if begin >= 0:
        keys[:, :, begin : begin + tokens] = k.transpose(1, 2)
        values[:, :, begin : begin + tokens] = v.transpose(1, 2)
    else:
        rows = torch.arange(batch, device=q.device)[:, None]
        keys[rows, :, places], values[rows, :, places] = k, v
    if begin == 0 and tokens == end:
        return attend(q, k, v, sinks, starts, None, True, window, scale)[0]
    first_place = max(0, begin - window + 1) if window and begin >= 0 else 0
    cached = keys[:, :, first_place:end], values[:, :, first_place:end]
    no_mask = begin >= 0 and begin + 1 == end and starts is None
    mask = None if no_mask else _mask(places, starts, first_place, end, window)
    if q.device.type != "cpu":
        k, v = (x.transpose(1, 2) for x in cached)
        return with_sink_token(q, k, v, sinks, mask, False, scale).contiguous()
    attended, sums = aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), *cached, 0.0, False, attn_mask=added_mask(mask, q.dtype), scale=scale
    )
    if sinks is not None:
        shares = torch.exp(sums - torch.logaddexp(sums, sinks.to(sums.dtype)[:, None]))
        attended = attended * shares[..., None].to(q.dtype)
    result: Tensor = attended.transpose(1, 2).contiguous()
    return result


def _mask(places: Tensor, starts: Tensor | None, first_place: int, end: int, window: int) -> Tensor:
    """The places from `first_place` to `end` that each token sees, bool [B, 1, T, end − first_place]."""
    own_places, seen_places = places[:, :, None], torch.arange(first_place, end, device=places.device)
    mask = seen_places <= own_places
    if window:
        mask = mask & (seen_places > own_places - window)
    if starts is not None:
        mask = mask & (seen_places >= starts[:, :, None])
    return mask[:, None]


cached_attention = define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor places, Tensor? starts, "
    "Tensor? sinks, int begin, int end, int window, float scale) -> Tensor",
    fake=lambda q, *_: q.new_empty(q.shape),
    check=_check,
    kernel=_attend,
)
"""q [B, T, H, head dim], k and v [B, T, KV, head dim] of T new tokens of each sequence, keys and values [B, KV, L, head
dim] of their places, sinks [H] -> attended, like q. Any floating dtype.

`places` int64 [B, T]: the place of each new token; k and v are written there. `begin` is the first of them where all
sequences have the same places, else −1; `end` is more than each of them. `starts` int64 [B, T]: the place where the
token's text begins, which it sees nothing before. `window`, `sinks`, `scale`: as in `masked_attention`.
"""


def _check_turn(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool) -> None:
    width = cos.shape[-1]
    is_whole_head = width == x.shape[-1] and start == 0 and not interleaved
    check(
        x.dim() == 4 and cos.shape == sin.shape and (is_whole_head or start + 2 * width <= x.shape[3]),
        lambda: f"moec::turn: {width} pairs from dim {start} must be in heads {list(x.shape)}",
    )


def _turn(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool) -> Tensor:
    width = x.shape[3]
    if cos.shape[-1] != width:
        return turned(x, cos, sin, start, interleaved, 1)
    wide = x.to(cos.dtype)
    return (wide * cos).addcmul_(wide.roll(width // 2, -1), sin).to(x.dtype)


turn = define(
    "turn(Tensor x, Tensor cos, Tensor sin, int start, bool interleaved) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    check=_check_turn,
    kernel=_turn,
)
"""Turns pairs of dims of x [B, T, H, head dim] from dim `start`, as `rope` does, by their cosines and sines
[B or 1, T, 1, pairs] in at least float32 -> like x. Where the first half of a head turns with the second, these may be
as wide as heads, each half of the cosines the same, the first half of the sines negative: then it takes less time.
"""
