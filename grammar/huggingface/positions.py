"""Reads rotary positions in both spellings of configs: `rope_parameters`, or `rope_theta` beside `rope_scaling`.

The numbers have the meaning of transformers 5.23, `modeling_rope_utils.py`.
"""

from __future__ import annotations

import math
from typing import Any

from moec.grammar.huggingface.config import MISSING, Config
from moec.grammar.huggingface.parts import FULL, SLIDING
from moec.grammar.spec import Linear, Llama3, LongRope, Ntk, Rope, Yarn

PARAMETERS = "rope_parameters", "rope_scaling"


def parameters_in(config: Config, spellings: tuple[str, ...] = PARAMETERS) -> Config:
    """The parameters of positions, or the family's where the config says none; of several spellings the last counts."""
    says = [key for key in spellings if config.values.get(key)]
    config.raw(*spellings)
    return config.nested(says[-1] if says else spellings[0])


def rope_of(
    config: Config,
    width: int,
    *,
    theta: float = 10_000.0,
    fraction: float = 1.0,
    kind: str = "",
    interleaved: bool = False,
    sharpens_scores: bool = False,
    partial: bool = False,
    by_alpha: bool = False,
    part_of: int | None = None,
    spellings: tuple[str, ...] = PARAMETERS,
    outside: bool = True,
) -> Rope:
    """The rotary positions of heads `width` wide.

    `theta` and `fraction` are the family's defaults. `kind` picks the parameters of one type of layers, where a config
    has an object for each. `sharpens_scores`: the family multiplies scores by yarn's `mscale_all_dim` (DeepSeek).
    `partial`: a part of each head can turn, `fraction` of it by default; others' code ignores the key.
    `by_alpha`: the type `dynamic` may have an `alpha` that fixes the base (Hunyuan).
    `part_of` is the width of which `partial_rotary_factor` is a part, where that is not `width`: it must give `width`.
    `spellings` are the keys with the parameters, of which the last one counts that says something. `outside`: keys
    beside them count for what they leave out.
    """
    outer = parameters_in(config, spellings)
    if kind:
        outer.raw(FULL, SLIDING)  # those of layers that this model does not have are no unknown keys
    rope = outer.nested(kind) if kind and kind in outer.values else outer
    if outside:
        theta = config.number("rope_theta", default=theta)
        if config.is_null("partial_rotary_factor"):
            fraction = 1.0
        fraction = config.number("partial_rotary_factor", default=fraction)
    base = rope.number("rope_theta", default=theta)
    part = rope.number("partial_rotary_factor", default=fraction)
    if not base > 0:
        rope.refuse("rope_theta", "a base of wavelengths is more than 0")
        base = theta
    if part_of is not None:
        if int(part_of * part) != width:
            rope.refuse("partial_rotary_factor", f"of {part_of} dimensions {width} turn")
        part = 1.0
    elif part != 1 and not partial:
        rope.refuse("partial_rotary_factor", "transformers turns whole heads in this architecture")
        part = 1.0
    if not 0 < part <= 1:
        rope.refuse("partial_rotary_factor", "the part of a head that turns is more than 0 and at most 1")
        part = 1.0
    turning = int(width * part)
    base, scaling = _scaled(config, rope, base, turning, by_alpha=by_alpha, sharpens_scores=sharpens_scores)
    return Rope(theta=base, scaling=scaling, fraction=part, interleaved=interleaved)


Scaling = Linear | Ntk | Yarn | Llama3 | LongRope


def _scaled(
    config: Config, rope: Config, base: float, turning: int, *, by_alpha: bool, sharpens_scores: bool
) -> tuple[float, Scaling | None]:
    """The base, which `alpha` changes, and the scaling for longer contexts. `turning` dims of a head turn."""
    word = rope.word("rope_type", "type", default="default")
    scaling: Scaling | None = None
    match word:
        case "default":
            pass
        case "mrope":
            rope.refuse("rope_type", "positions of images and videos have no word in moec")
        case "linear":
            scaling = Linear(factor=_factor(rope))
        case "dynamic" if by_alpha and rope.has("alpha"):  # a base times alpha ^ (d / (d - 2))
            base *= rope.number("alpha") ** (turning / (turning - 2))
            rope.number("factor", default=1.0)
        case "dynamic":
            scaling = Ntk(factor=_factor(rope))
        case "llama3":
            scaling = Llama3(
                factor=_factor(rope),
                low=rope.number("low_freq_factor"),
                high=rope.number("high_freq_factor"),
                original=_original(config, rope),
            )
        case "yarn":
            scaling = _yarn(config, rope, sharpens_scores)
        case "longrope" | "su":
            scaling = _longrope(config, rope, turning)
        case _:
            rope.refuse("rope_type", "moec has `linear`, `dynamic`, `yarn`, `llama3` and `longrope`")
    if not isinstance(scaling, Yarn):
        _unused(rope, "beta_fast", "beta_slow", "mscale")
        if rope.raw("mscale_all_dim") and sharpens_scores and word != "default":
            rope.refuse("mscale_all_dim", "moec sharpens scores with `yarn` alone")
    return base, scaling


def _unused(rope: Config, *keys: str) -> None:
    """Marks keys as read that have no meaning for this type."""
    for key in keys:
        rope.raw(key)


def _factor(rope: Config, default: Any = MISSING) -> float:
    """The factor of the context over the trained context."""
    factor = rope.number("factor", default=default)
    if factor < 1:
        rope.refuse("factor", "a longer context has a factor of at least 1")
        return 1.0
    return factor


def _original(config: Config, rope: Config) -> int:
    """The trained context: a key beside the parameters takes precedence over one inside of them (Phi-3)."""
    context = config.count("max_position_embeddings", "max_seq_len", default=1)
    inside = rope.count("original_max_position_embeddings", default=context)
    return config.count("original_max_position_embeddings", default=inside)


def _yarn(config: Config, rope: Config, sharpens_scores: bool) -> Yarn:
    original = _original(config, rope)
    ratio = config.count("max_position_embeddings", "max_seq_len", default=original) / original
    factor = _factor(rope, default=ratio)
    mscale, every = rope.number("mscale", default=0.0), rope.number("mscale_all_dim", default=0.0)
    if rope.has("attention_factor"):
        every = every if sharpens_scores else 0.0
        mscale = _mscale_for(rope, factor, 0.1 * every * math.log(factor) + 1)
    elif every and not mscale:
        rope.refuse("mscale_all_dim", "without `mscale` it changes scores, but not the dims that turn")
    elif not (mscale and every):
        mscale = every = 0.0
    if every and not sharpens_scores:
        rope.refuse("mscale_all_dim", "this architecture does not sharpen scores by it, and moec's `yarn` does")
    return Yarn(
        factor=factor,
        original=original,
        beta_fast=rope.number("beta_fast", default=32.0) or 32.0,
        beta_slow=rope.number("beta_slow", default=1.0) or 1.0,
        mscale=max(mscale, 0.0),
        mscale_all=max(every, 0.0),
        truncate=rope.flag("truncate", default=True),
    )


def _mscale_for(rope: Config, factor: float, divisor: float) -> float:
    """The `mscale` with which yarn's sharpening, over this divisor, is the stated `attention_factor`."""
    wanted = rope.number("attention_factor") * divisor
    plain = 0.1 * math.log(factor) + 1
    if math.isclose(wanted, plain, rel_tol=1e-9):
        return 0.0
    if factor <= 1 or wanted <= 1:
        rope.refuse("attention_factor", "yarn sharpens attention by a factor of more than 1")
        return 0.0
    return (wanted - 1) / (0.1 * math.log(factor))


def _longrope(config: Config, rope: Config, turning: int) -> LongRope:
    original = _original(config, rope)
    context = config.count("max_position_embeddings", "max_seq_len", default=original)
    short = rope.numbers("short_factor", length=turning // 2) or (1.0,) * (turning // 2)
    long = rope.numbers("long_factor", length=turning // 2) or (1.0,) * (turning // 2)
    for key in ("short_factor", "long_factor"):
        if not rope.has(key):
            rope.count(key)  # the diagnostic of a missing key
    ratio = rope.number("factor", default=context / original)
    if rope.has("factor") and not math.isclose(ratio, context / original):
        rope.refuse("factor", f"moec's factor is that of the contexts, {context} / {original}")
    growth = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0
    for key in ("attention_factor", "short_mscale", "long_mscale"):
        stated = rope.number(key, default=growth)
        if key != "short_mscale" and not math.isclose(stated, growth, rel_tol=1e-9):
            rope.refuse(key, f"moec's factor is sqrt(1 + log({context} / {original}) / log({original})) = {growth:.6g}")
    if context > original:
        rope.note("long_factor", f"moec uses these factors for every sequence; transformers from {original} tokens on")
    return LongRope(short=short, long=long, original=original)
