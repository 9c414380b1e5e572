"""Attention of every kind by its definition in plain PyTorch: scores, a mask, a softmax; no fused kernel.

`plain_logits(spec, weights, tokens)` is a dense model with RMS norms and `gelu` feed-forwards; `weights` are tensors by
moec's names. It takes nothing from moec but the numbers of the Spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.grammar.spec import Attention, Layer, Mla, RmsNorm, Rope, Spec

Weights = Mapping[str, Tensor]


def plain_logits(spec: Spec, weights: Weights, tokens: Tensor) -> Tensor:
    """Logits [batch, sequence, vocab] of tokens [batch, sequence]."""
    model, eps = spec.model, spec.model.norm.eps
    assert isinstance(model.norm, RmsNorm)
    position, text = positions_and_texts(tokens, model.embedding.separator)
    real = tokens != (-1 if model.embedding.padding is None else model.embedding.padding)
    x = weights["embedding.weight"][tokens]
    if model.embedding.positions == "learned":
        x = x + weights["positions.weight"][position]
    for number, layer in enumerate(model.layers):
        own = {name.removeprefix(f"layers.{number}."): w for name, w in weights.items()}
        seen = visible(layer.attention, text, real)
        h = rms(x, own["attention_norm.weight"], eps)
        x = x + attend(spec, layer, own, h, position, seen)
        h = rms(x, own["ffn_norm.weight"], eps)
        x = x + F.linear(F.gelu(F.linear(h, own["ffn.up.weight"][0])), own["ffn.down.weight"])
    return F.linear(rms(x, weights["norm.weight"], eps), weights["head.weight"])


def positions_and_texts(tokens: Tensor, separator: int | None) -> tuple[Tensor, Tensor]:
    """Each token's position in its text and its text's number; a separator is the last token of its text."""
    position, text = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row in range(tokens.shape[0]):
        place = number = 0
        for column, token in enumerate(tokens[row].tolist()):
            position[row, column], text[row, column] = place, number
            ended = token == separator
            place, number = (0, number + 1) if ended else (place + 1, number)
    return position, text


def visible(attention: Attention, text: Tensor, real: Tensor) -> Tensor:
    """Whether token i sees token j, [batch, i, j]."""
    length = text.shape[1]
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = text[:, :, None] == text[:, None]
    if attention.causal:
        seen = seen & (j <= i)
    else:
        seen = seen & (real[:, :, None] == real[:, None])
    if attention.window is not None:
        seen = seen & ((i - j).abs() < attention.window)
    return seen


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dims, as many as the weight has."""
    dims = tuple(range(-weight.dim(), 0))
    return x / (x.square().mean(dims, keepdim=True) + eps).sqrt() * weight


def attend(spec: Spec, layer: Layer, own: Weights, h: Tensor, position: Tensor, seen: Tensor) -> Tensor:
    attention = layer.attention
    width = (
        attention.nope_dim + attention.rope_dim if isinstance(attention, Mla) else own["attention.q.weight"].shape[1]
    )
    make = latent_heads if isinstance(attention, Mla) else heads_of
    q, k, v = make(spec, attention, own, h, position)
    copies = q.shape[2] // k.shape[2]
    k, v = (heads.repeat_interleave(copies, dim=2) for heads in (k, v))
    scale = attention.multiplier or 1 / math.sqrt(width)
    scale = scale * score_factor(attention.rope)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if attention.sinks:
        sink = own["attention.sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    attended = torch.einsum("bhij,bjhd->bihd", shares, v)
    if attention.output_gate != "none":
        weight = own["attention.output_gate.weight"]
        logits = torch.einsum("bsd,h...d->bsh...", h, weight)
        attended = attended * torch.sigmoid(logits if attention.output_gate == "element" else logits[..., None])
    y = torch.einsum("bihd,ohd->bio", attended, own["attention.o.weight"])
    return y + own["attention.o.bias"] if attention.bias == "all" else y


def heads_of(spec: Spec, attention: Attention, own: Weights, h: Tensor, position: Tensor) -> list[Tensor]:
    """q, k and v [batch, sequence, heads, width] of multi-head and grouped-query attention."""
    made = []
    for name in "qkv":
        x = torch.einsum("bsd,hwd->bshw", h, own[f"attention.{name}.weight"])
        if attention.bias != "none":
            x = x + own[f"attention.{name}.bias"]
        made.append(x)
    v = made[2]
    normed_last = attention.qk_norm_place == "after_rope"
    for index, name in enumerate("qk"):
        x = made[index]
        for step in ("clip", "turn", "norm") if normed_last else ("norm", "clip", "turn"):
            if step == "norm" and attention.qk_norm != "none":
                x = rms(x, own[f"attention.{name}_norm.weight"], spec.model.norm.eps)
            elif step == "clip" and attention.clip is not None:
                x = x.clamp(-attention.clip, attention.clip)
            elif step == "turn" and attention.rope is not None:
                context = spec.model.context or (spec.train.sequence if spec.train else None)
                assert context is not None
                width = int(attention.rope.fraction * x.shape[-1] + 1e-9)
                x = turned(x, attention.rope, position, 0, width, context)
        made[index] = x
    return [*made[:2], v if attention.clip is None else v.clamp(-attention.clip, attention.clip)]


def latent_heads(spec: Spec, attention: Mla, own: Weights, h: Tensor, position: Tensor) -> list[Tensor]:
    """q, k and v of latent attention (DeepSeek-V2, equations 9 to 19), norms as in DeepSeek-V3."""
    eps = attention.latent_eps or spec.model.norm.eps

    def down(name: str) -> Tensor:
        bias = own[f"attention.{name}.bias"] if attention.bias != "none" else None
        return F.linear(h, own[f"attention.{name}.weight"], bias)

    latent = h
    if attention.q_rank is not None:
        latent = rms(down("q_down"), own["attention.q_down_norm.weight"], eps)
    q = torch.einsum("bsd,hwd->bshw", latent, own["attention.q.weight"])
    latent = rms(down("kv_down"), own["attention.kv_down_norm.weight"], eps)
    k = torch.einsum("bsd,hwd->bshw", latent, own["attention.k.weight"])
    v = torch.einsum("bsd,hwd->bshw", latent, own["attention.v.weight"])
    shared = torch.einsum("bsd,hwd->bshw", h, own["attention.k_rope.weight"])
    if attention.bias != "none":
        shared = shared + own["attention.k_rope.bias"]
    if attention.rope is not None:
        context = spec.model.context or spec.train.sequence
        turn = (attention.rope, position)
        q = turned(q, *turn, attention.nope_dim, attention.rope_dim, context)
        shared = turned(shared, *turn, 0, attention.rope_dim, context)
    k = torch.cat([k, shared.expand(*k.shape[:3], -1)], -1)
    return [q, k, v]


# ---- rotary positions --------------------------------------------------------------------------------------


def turned(x: Tensor, rope: Rope, position: Tensor, start: int, width: int, context: int) -> Tensor:
    """`width` dims from `start` turn as complex numbers; the others stay."""
    before, part, after = x.split([start, width, x.shape[-1] - start - width], -1)
    frequencies, factor = plain_frequencies(rope, width, context)
    angle = position[:, :, None, None] * frequencies
    by = torch.polar(torch.full_like(angle, factor), angle)
    if rope.interleaved:
        pairs = torch.complex(part[..., 0::2].contiguous(), part[..., 1::2].contiguous()) * by
        part = torch.view_as_real(pairs).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        pairs = torch.complex(first.contiguous(), second.contiguous()) * by
        part = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([before, part, after], -1)


def plain_frequencies(rope: Rope, width: int, context: int) -> tuple[Tensor, float]:
    """Radians per position of each pair, and the factor on rotated vectors."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    base, scaling = rope.theta, rope.scaling
    plain = base ** (-2 * pair / width)
    match scaling.word if scaling is not None else "":
        case "":
            return plain, 1.0
        case "linear":  # Chen et al. 2023, equation 4: position / factor
            return plain / scaling.factor, 1.0
        case "ntk":  # base' = base · s^(d / (d - 2)) with s from the length
            trained = scaling.original or context
            stretch = scaling.factor * max(context, trained) / trained - (scaling.factor - 1)
            return (base * stretch ** (width / (width - 2))) ** (-2 * pair / width), 1.0
        case "llama3":
            turns = scaling.original * plain / (2 * math.pi)
            smooth = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
            return plain * (smooth + (1 - smooth) / scaling.factor), 1.0
        case "longrope":
            beyond = context > scaling.original
            factors = torch.tensor(scaling.long if beyond else scaling.short, dtype=torch.float64)
            ratio = context / scaling.original
            return plain / factors, math.sqrt(1 + math.log(ratio) / math.log(scaling.original)) if beyond else 1.0
        case "yarn":  # Peng et al. 2023, section 3.2 and 3.4; the ramp is over pair numbers, as in their code
            low, high = (
                width * math.log(scaling.original / (2 * math.pi * turns)) / (2 * math.log(base))
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, width - 1)
            ramp = ((pair - low) / (high - low if high != low else 0.001)).clamp(0, 1)
            factor = sharpening(scaling.factor, scaling.mscale or 1) / sharpening(scaling.factor, scaling.mscale_all)
            return plain * (1 - ramp) + plain / scaling.factor * ramp, factor
    raise AssertionError(scaling)


def sharpening(factor: float, mscale: float) -> float:
    """Peng et al. 2023, equation 22: sqrt(1 / t) = 0.1 ln(s) + 1."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def score_factor(rope: Rope | None) -> float:
    """DeepSeek's factor on scores, of queries and keys, for all dimensions."""
    if rope is None or rope.scaling is None or rope.scaling.word != "yarn" or not rope.scaling.mscale_all:
        return 1.0
    return sharpening(rope.scaling.factor, rope.scaling.mscale_all) ** 2
