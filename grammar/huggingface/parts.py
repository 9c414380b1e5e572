"""Reads keys that several families have in common: widths, attention, feed-forwards, which layers are sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.spec import DType, FeedForward, Gqa, Layer, Mha, Model, Moe, RmsNorm, Rope, TokenEmbedding
from moec.grammar.spec.base import Node
from moec.grammar.spec.experts import GeGLU, Gelu, Relu, Relu2, Silu, SwiGLU

GATED: dict[str, type[Node]] = {"silu": SwiGLU, "swish": SwiGLU, "gelu": GeGLU}
PLAIN: dict[str, type[Node]] = {"gelu": Gelu, "relu": Relu, "relu2": Relu2, "silu": Silu}


def gated(config: Config, hidden: int, key: str = "hidden_act", *, bias: bool = False, **options: Any) -> Any:
    """A gated feed-forward with the config's activation."""
    word = config.word(key, default="silu")
    kind = GATED.get(word)
    if kind is None:
        config.refuse(key, f"moec has the gated activations {', '.join(sorted(set(GATED) - {'swish'}))}")
        kind = SwiGLU
    return kind(hidden=hidden, bias=bias, **options)


def eps_of(config: Config, default: float, key: str = "rms_norm_eps") -> float:
    """The epsilon of norms."""
    eps = config.number(key, default=default)
    if not 0 < eps < 1:
        config.refuse(key, "it must be more than 0 and less than 1")
        return default
    return eps


def positive(config: Config, key: str, default: float) -> float:
    """A number above 0, such as a multiplier."""
    value = config.number(key, default=default)
    if not value > 0:
        config.refuse(key, "moec's multipliers are more than 0")
        return 1.0
    return value


def shared_of(config: Config, key: str, default: int) -> int:
    """How many shared experts there are, or how wide the one is; 0 for none."""
    if config.is_null(key):
        usual = config.defaults.get(key, default)
        config.refuse(key, f"transformers takes no null here: 0 means none, and left out it is {usual}")
    return config.count(key, default=default, least=0)


def heads_of(config: Config) -> tuple[int, int, int]:
    """Query heads, key and value heads, and the width of a head."""
    heads, dim = config.count("num_attention_heads"), config.count("hidden_size")
    kv_heads = config.count("num_key_value_heads", default=heads)
    width = config.count("head_dim", default=max(1, dim // heads))
    if heads % kv_heads and config.has("num_attention_heads"):
        config.refuse("num_key_value_heads", f"it does not divide the {heads} heads")
        kv_heads = heads
    return heads, kv_heads, width


def attention_of(config: Config, *, rope: Rope | None, **options: Any) -> Gqa | Mha:
    """Attention with the config's heads: `mha` where every head has its own key and value."""
    heads, kv_heads, width = heads_of(config)
    return grouped(heads, kv_heads, width, config.count("hidden_size"), rope=rope, **options)


def grouped(heads: int, kv_heads: int, width: int, dim: int, **options: Any) -> Gqa | Mha:
    """Attention with these heads, each `width` wide, in a model `dim` wide."""
    head_dim = None if width * heads == dim else width
    if heads == kv_heads:
        return Mha(heads=heads, head_dim=head_dim, **options)
    return Gqa(heads=heads, kv_heads=kv_heads, head_dim=head_dim, **options)


def bias_of(config: Config, key: str, *, default: bool = False, word: str = "all") -> Any:
    """`word` where the flag `key` says that projections have biases."""
    return word if config.flag(key, default=default) else "none"


FULL, SLIDING = "full_attention", "sliding_attention"


def kinds_of_attention(config: Config, depth: int, default: Callable[[int], str] = lambda number: FULL) -> list[str]:
    """Each layer's entry of `layer_types`; `default` gives it where the key is left out."""
    kinds = config.words("layer_types", length=depth) or tuple(map(default, range(depth)))
    for kind in sorted(set(kinds) - {FULL, SLIDING}):
        config.refuse("layer_types", f"moec has no attention of the kind `{kind}`")
    return list(kinds)


def windows_of(config: Config, kinds: Sequence[str], default: int | None = None) -> list[int | None]:
    """The window of each layer, None for layers that see everything."""
    if SLIDING not in kinds:
        config.raw("sliding_window")
        return [None] * len(kinds)
    window = effective(config, config.count("sliding_window", **({} if default is None else {"default": default})))
    return [window if kind == SLIDING else None for kind in kinds]


def window_of(config: Config) -> int | None:
    """The window of every layer; None where a token sees everything."""
    window = config.count_or_none("sliding_window")
    return None if window is None else effective(config, window)


def effective(config: Config, window: int) -> int | None:
    """A window, or None for one that is no shorter than the context: it hides nothing."""
    return window if window < config.count("max_position_embeddings") else None


def sparse_from(depth: int, first: int) -> list[bool]:
    """Which layers have experts: those from `first` on."""
    return [number >= first for number in range(depth)]


def sparse_layers(config: Config, depth: int, dense_before: int = 0) -> list[bool]:
    """Which layers have experts: the sparse ones of `mlp_layer_types`, if the family has it, else all from
    `dense_before` on."""
    kinds = config.words("mlp_layer_types", length=depth)
    if kinds is None:
        return sparse_from(depth, dense_before)
    for kind in sorted(set(kinds) - {"dense", "sparse"}):
        config.refuse("mlp_layer_types", f"a layer is dense or sparse, not `{kind}`")
    return [kind == "sparse" for kind in kinds]


def depth_of(config: Config) -> int:
    """Number of layers, at most what moec takes."""
    depth = config.count("num_hidden_layers")
    if depth > 10_000:
        config.refuse("num_hidden_layers", "moec takes at most 10_000 layers")
        return 1
    return depth


def layers_of(attentions: Sequence[Any], bodies: Sequence[FeedForward | Moe]) -> tuple[Layer, ...]:
    """The layers; equal ones are one object."""
    layers: dict[tuple[Any, Any], Layer] = {}
    for attention, body in zip(attentions, bodies, strict=True):
        key = (attention, body)
        if key not in layers:
            slot = {"moe": body} if isinstance(body, Moe) else {"ffn": body}
            layers[key] = Layer(attention=attention, **slot)
    return tuple(layers[key] for key in zip(attentions, bodies, strict=True))


def decoder(config: Config, layers: Sequence[Layer], *, eps: float, tied: bool = False, **options: Any) -> Model:
    """The model of a decoder with RMS norms."""
    embedding = options.pop("embedding", {})
    return Model(
        name=config.word("model_type"),
        vocab=config.count("vocab_size"),
        dim=config.count("hidden_size"),
        depth=len(layers),
        context=config.count("max_position_embeddings"),
        dtype=dtype_of(config),
        norm=options.pop("norm", None) or RmsNorm(eps=eps),
        embedding=TokenEmbedding(tied=config.flag("tie_word_embeddings", default=tied), **embedding),
        layers=tuple(layers),
        **options,
    )


def mixed(
    config: Config, attentions: Sequence[Any], sparse: Sequence[bool], body: Moe, eps: float, **options: Any
) -> Model:
    """The layers; sparse ones have `body`, the others a dense feed-forward."""
    dense = None if all(sparse) else gated(config, config.count("intermediate_size"))
    config.raw("intermediate_size")
    bodies: list[Any] = [body if is_sparse else dense for is_sparse in sparse]
    return decoder(config, layers_of(attentions, bodies), eps=eps_of(config, eps), **options)


DTYPES = {"float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.BF16}


def dtype_of(config: Config) -> DType:
    """The dtype in which the weights are stored; bf16 for fp16, which moec does not train in."""
    word = config.word("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    if word not in DTYPES:
        config.refuse("dtype" if config.has("dtype") else "torch_dtype", "moec has float32 and bfloat16")
        return DType.FP32
    if word == "float16":
        config.note("dtype" if config.has("dtype") else "torch_dtype", "moec computes in bf16 instead")
    return DTYPES[word]
