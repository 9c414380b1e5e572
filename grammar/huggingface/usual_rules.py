"""The tensors of a decoder by the names of most families; a family states its differences."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moec.grammar.huggingface.rules import Piece, Rule, same
from moec.grammar.spec import FeedForward, Gqa, Layer, Mha, Mla, Model, Moe, Online, TopK

PRE_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GATE_UP_DOWN = "gate_proj", "up_proj", "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Where tensors lie. Those of a layer are under `model.layers.N.`; `{e}` stands for an expert's number.

    `experts` and `dense` have the names of gate, up and down. `fused` are the names of all experts' gates and ups in
    one tensor, and of their downs; `written_fused`: transformers saves these.
    """

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    head_bias: str = "lm_head.bias"
    layer: str = "model.layers.{n}."
    attention: str = "self_attn."
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    output_gate: str = "gate_proj"
    sinks: str = "sinks"
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    ffn: str = "mlp."
    dense: tuple[str, str, str] = GATE_UP_DOWN
    moe: str = "mlp."
    router: str = "gate.weight"
    bias: str = "gate.e_score_correction_bias"
    bias_form: str = "e"
    experts: str = "experts.{e}."
    expert: tuple[str, str, str] = GATE_UP_DOWN
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    written_fused: bool = False
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate.weight"


Attend = Callable[[Names, Layer, str, str], Iterator[Rule]]
Feed = Callable[[Layer, str, str], Iterator[Rule]]
Mix = Callable[[Names, Moe, str, str, Container[str] | None], Iterator[Rule]]


def rules_by(
    *spellings: Names, attend: Attend | None = None, mix: Mix | None = None, feed: Feed | None = None
) -> Callable[[Model, Container[str] | None], Sequence[Rule]]:
    """The function that gives a model's rules. Of several `spellings` transformers saves the first.

    `attend`, `mix` and `feed` replace the rules of attention, of mixtures and of dense feed-forwards.
    """

    def rules(model: Model, present: Container[str] | None = None) -> Sequence[Rule]:
        names = _spelling(spellings, model, present)
        all_rules = list(_model_rules(names, model))
        for number, layer in enumerate(model.layers):
            theirs, ours = names.layer.format(n=number), f"layers.{number}."
            all_rules += [same(f"{theirs}{name}.weight", f"{ours}{norm}.weight") for norm, name in names.norms.items()]
            all_rules += [
                same(f"{theirs}{name}.bias", f"{ours}{norm}.bias")
                for norm, name in names.norms.items()
                if getattr(model.norm, "bias", False)
            ]
            all_rules += (attend or attention_rules)(names, layer, theirs, ours)
            if layer.moe is not None:
                all_rules += (mix or mixture_rules)(names, layer.moe, theirs, ours, present)
            elif feed is not None:
                all_rules += feed(layer, theirs, ours)
            else:
                assert layer.ffn is not None
                all_rules += dense_rules(layer.ffn, theirs + names.ffn, f"{ours}ffn.", names.dense)
        return all_rules

    return rules


def _spelling(spellings: Sequence[Names], model: Model, present: Container[str] | None) -> Names:
    """The first spelling whose router, bias, shared expert and sinks a checkpoint has; else what transformers saves."""
    sparse = next((number for number, layer in enumerate(model.layers) if layer.moe is not None), None)
    if present is None or sparse is None:
        return spellings[0]

    with_sinks = next((number for number, layer in enumerate(model.layers) if layer.attention.sinks), None)
    moe = model.layers[sparse].moe
    assert moe is not None

    def wanted(names: Names) -> set[str]:
        layer = names.layer.format(n=sparse)
        wanted_names = {layer + names.moe + names.router}
        if isinstance(moe.gate, TopK) and isinstance(moe.gate.bias, Online):
            wanted_names.add(layer + names.moe + names.bias)
        if moe.shared is not None:
            wanted_names.add(f"{layer}{names.shared}{names.dense[0]}.weight")
        if with_sinks is not None:
            wanted_names.add(names.layer.format(n=with_sinks) + names.attention + names.sinks)
        return wanted_names

    alike = set.intersection(*map(wanted, spellings))
    fitting = (names for names in spellings if all(name in present for name in wanted(names) - alike))
    return next(fitting, spellings[0])


def _model_rules(names: Names, model: Model) -> Iterator[Rule]:
    yield same(names.embedding, "embedding.weight", "v d")
    yield same(names.norm, "norm.weight")
    if getattr(model.norm, "bias", False):
        yield same(names.norm.replace(".weight", ".bias"), "norm.bias")
    tied = model.embedding.tied
    own = "embedding.weight" if tied else "head.weight"
    yield same(names.head, own, "v d", optional=tied, written=not tied)
    if getattr(model.embedding, "logits_bias", False):
        yield same(names.head_bias, "head.bias", "v")


def attention_rules(names: Names, layer: Layer, theirs: str, ours: str) -> Iterator[Rule]:
    """Attention with a projection each for queries, keys, values and results, or DeepSeek's with latent vectors."""
    attention, theirs, ours = layer.attention, theirs + names.attention, f"{ours}attention."
    if isinstance(attention, Mla):
        yield from _latent_rules(attention, theirs, ours)
        return
    assert isinstance(attention, Gqa | Mha)
    for part in "qkv":
        yield Rule(f"{theirs}{part}_proj.weight", "(h c) d", (Piece(f"{ours}{part}.weight", "h c d"),))
        if attention.bias != "none":
            yield Rule(f"{theirs}{part}_proj.bias", "(h c)", (Piece(f"{ours}{part}.bias", "h c"),))
    yield Rule(f"{theirs}{names.out}.weight", "d (h c)", (Piece(f"{ours}o.weight", "d h c"),))
    if attention.bias == "all":
        yield same(f"{theirs}{names.out}.bias", f"{ours}o.bias")
    if attention.qk_norm != "none":
        form, axes = ("c", "c") if attention.qk_norm == "head" else ("(h c)", "h c")
        for part, name in (("q", names.q_norm), ("k", names.k_norm)):
            yield Rule(f"{theirs}{name}.weight", form, (Piece(f"{ours}{part}_norm.weight", axes),))
    if attention.sinks:
        yield same(theirs + names.sinks, f"{ours}sinks", "h")
    if getattr(attention, "output_gate", "none") != "none":
        form, axes = ("h d", "h d") if attention.output_gate == "head" else ("(h c) d", "h c d")
        yield Rule(f"{theirs}{names.output_gate}.weight", form, (Piece(f"{ours}output_gate.weight", axes),))


def _latent_rules(attention: Mla, theirs: str, ours: str) -> Iterator[Rule]:
    """The names of DeepSeek-V2's code. Keys without positions and values are made by one projection."""
    if attention.q_rank is None:
        yield Rule(f"{theirs}q_proj.weight", "(h c) d", (Piece(f"{ours}q.weight", "h c d"),))
    else:
        yield same(f"{theirs}q_a_proj.weight", f"{ours}q_down.weight", "r d")
        yield same(f"{theirs}q_a_layernorm.weight", f"{ours}q_down_norm.weight")
        yield Rule(f"{theirs}q_b_proj.weight", "(h c) r", (Piece(f"{ours}q.weight", "h c r"),))
        if attention.bias != "none":
            yield same(f"{theirs}q_a_proj.bias", f"{ours}q_down.bias")
    down = Piece(f"{ours}kv_down.weight", "r d"), Piece(f"{ours}k_rope.weight", "1 r d", {"1": 0})
    yield Rule(f"{theirs}kv_a_proj_with_mqa.weight", "r d", down, along="r")
    if attention.bias != "none":
        biases = Piece(f"{ours}kv_down.bias", "r"), Piece(f"{ours}k_rope.bias", "1 r", {"1": 0})
        yield Rule(f"{theirs}kv_a_proj_with_mqa.bias", "r", biases, along="r")
    yield same(f"{theirs}kv_a_layernorm.weight", f"{ours}kv_down_norm.weight")
    made = Piece(f"{ours}k.weight", "h c r"), Piece(f"{ours}v.weight", "h c r")
    yield Rule(f"{theirs}kv_b_proj.weight", "(h c) r", made, along="c")
    yield Rule(f"{theirs}o_proj.weight", "d (h c)", (Piece(f"{ours}o.weight", "d h c"),))
    if attention.bias == "all":
        yield same(f"{theirs}o_proj.bias", f"{ours}o.bias")


def dense_rules(ffn: FeedForward, theirs: str, ours: str, parts: tuple[str, str, str] = GATE_UP_DOWN) -> Iterator[Rule]:
    """A gated feed-forward with a projection each for gate, up and down."""
    bias = getattr(ffn, "bias", False)
    for number, part in enumerate(parts[:2]):
        yield Rule(f"{theirs}{part}.weight", "f d", (Piece(f"{ours}up.weight", "p f d", {"p": number}),))
        if bias:
            yield Rule(f"{theirs}{part}.bias", "f", (Piece(f"{ours}up.bias", "p f", {"p": number}),))
    yield same(f"{theirs}{parts[2]}.weight", f"{ours}down.weight", "d f")
    if bias:
        yield same(f"{theirs}{parts[2]}.bias", f"{ours}down.bias")


def mixture_rules(names: Names, moe: Moe, theirs: str, ours: str, present: Container[str] | None) -> Iterator[Rule]:
    """The router, its bias, experts one by one or in one tensor, and the shared expert."""
    yield same(f"{theirs}{names.moe}{names.router}", f"{ours}moe.gate.weight", "e d")
    if isinstance(moe.gate, TopK) and isinstance(moe.gate.bias, Online):
        bias = Piece(f"{ours}moe.gate.bias", "e")
        yield Rule(f"{theirs}{names.moe}{names.bias}", names.bias_form, (bias,))
    yield from expert_rules(names, moe, theirs + names.moe, f"{ours}moe.experts.", present)
    if moe.shared is not None:
        yield from dense_rules(moe.shared, theirs + names.shared, f"{ours}moe.shared.", names.dense)
        if getattr(moe.shared, "gated", False):
            yield same(theirs + names.shared_gate, f"{ours}moe.shared_gate.weight", "g d")


def expert_rules(names: Names, moe: Moe, theirs: str, ours: str, present: Container[str] | None) -> Iterator[Rule]:
    """Experts in the spelling that the checkpoint has, else in the one that transformers saves."""
    fused = names.written_fused if present is None else theirs + names.fused[0] in present
    if fused:
        yield Rule(theirs + names.fused[0], "e (p f) d", (Piece(f"{ours}up.weight", "e p f d"),))
        yield same(theirs + names.fused[1], f"{ours}down.weight", "e d f")
        return
    (part,) = moe.parts
    for number in range(part.count):
        at = theirs + names.experts.format(e=number)
        for half, name in enumerate(names.expert[:2]):
            piece = Piece(f"{ours}up.weight", "e p f d", {"e": number, "p": half})
            yield Rule(f"{at}{name}.weight", "f d", (piece,))
        yield Rule(f"{at}{names.expert[2]}.weight", "d f", (Piece(f"{ours}down.weight", "e d f", {"e": number}),))
        if getattr(part.body, "bias", False):
            for half, name in enumerate(names.expert[:2]):
                yield Rule(f"{at}{name}.bias", "f", (Piece(f"{ours}up.bias", "e p f", {"e": number, "p": half}),))
            yield Rule(f"{at}{names.expert[2]}.bias", "d", (Piece(f"{ours}down.bias", "e d", {"e": number}),))
