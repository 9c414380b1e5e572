"""Sums over ops of library models: Megatron's count of FLOPs, and what rings and pairwise exchanges send, by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from support.tables import each_row

import moec.grammar
from moec.grammar import load_text
from moec.passes.cost.totals import Tally, tally
from moec.passes.pipeline import compile_program

SEQUENCE, WIDTH, MASTER = 4096, 2, 4
"""Tokens; bytes of an activation or weight that travels, and of a gradient."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Numbers of a config.json. `mla`: rank of queries, rank of keys, and the widths of a head's parts: without
    position, with it, and of values. `first`: how many dense layers, and their width. `has_bias`: routers have one that
    is updated online."""

    vocab: int
    dim: int
    depth: int
    heads: int
    experts: int
    k: int
    hidden: int
    kv_heads: int = 0
    head_dim: int = 128
    shared: int = 0
    first: tuple[int, int] = (0, 0)
    mla: tuple[int, int, int, int, int] | None = None
    has_bias: bool = False

    @property
    def mixtures(self) -> int:
        return self.depth - self.first[0]


DEEPSEEK = Model(
    vocab=129_280,
    dim=7168,
    depth=61,
    heads=128,
    experts=256,
    k=8,
    hidden=2048,
    shared=2048,
    first=(3, 18_432),
    mla=(1536, 512, 128, 64, 128),
    has_bias=True,
)
MODELS = {
    "mixtral_8x7b": Model(vocab=32_000, dim=4096, depth=32, heads=32, kv_heads=8, experts=8, k=2, hidden=14_336),
    "mixtral_8x22b": Model(vocab=32_000, dim=6144, depth=56, heads=48, kv_heads=8, experts=8, k=2, hidden=16_384),
    "qwen2_57b_a14b": Model(
        vocab=151_936, dim=3584, depth=28, heads=28, kv_heads=4, experts=64, k=8, hidden=2560, shared=20_480
    ),
    "qwen3_30b_a3b": Model(vocab=151_936, dim=2048, depth=48, heads=32, kv_heads=4, experts=128, k=8, hidden=768),
    "qwen3_235b_a22b": Model(vocab=151_936, dim=4096, depth=94, heads=64, kv_heads=4, experts=128, k=8, hidden=1536),
    "deepseek_v3": DEEPSEEK,
}


def tallied(name: str, depth: int, ranks: int, batch: int, parallel: str) -> Tally:
    """The tally of a library model without its balance losses, before the budget."""
    text = (Path(moec.grammar.__file__).with_name("library") / "models" / f"{name}.moe").read_text()
    text = re.sub(r"depth *= \d+", f"depth = {depth}", re.sub(r"balance *= .*", "", text))
    text += 'device "any" { kind = cuda; memory = 80GB; bandwidth = 1TB/s }\n'
    text += f'cluster "flat" {{ device = any; level "all" {{ size = {ranks} }} }}\n'
    text += f"train {{ batch = {batch}; sequence = {SEQUENCE} }}\nparallel {{ {parallel} }}\n"
    spec = load_text(text, name=f"{name}.moe").unwrap()
    return tally(compile_program(spec, stop_after="schedule").program, spec)


def megatron_flops(m: Model) -> float:
    """FLOPs of a token by `num_floating_point_operations` of Megatron-LM: causal half of attention, no router, and one
    more for each element that MLA's norms take."""
    if m.mla:
        q_rank, kv_rank, nope, rope, value = m.mla
        attention = q_rank * (m.dim + m.heads * (nope + rope) + 1) + kv_rank * (m.dim + m.heads * (nope + value) + 1)
        attention += m.dim * rope + m.heads * value * m.dim
        attention += SEQUENCE * m.heads * (nope + rope + value) / 2
    else:
        query, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
        attention = m.dim * (2 * query + 2 * kv) + SEQUENCE * query
    dense, width = m.first
    feed_forward = 3 * m.dim * (dense * width + m.mixtures * (m.hidden * m.k + m.shared))
    return 6 * (m.depth * attention + feed_forward + m.vocab * m.dim)


@each_row("name", MODELS)
def test_flops_of_a_token_are_those_that_megatron_counts_and_routers(name: str) -> None:
    m = MODELS[name]
    counted = tallied(name, m.depth, ranks=1, batch=1, parallel="").flops_per_token
    expected = megatron_flops(m) + 6 * m.dim * m.experts * m.mixtures
    if name == "qwen2_57b_a14b":
        expected += 6 * m.dim * m.depth  # the gate of the shared expert
    if m.mla:
        norms = 6 * m.depth * sum(m.mla[:2])
        assert 2e-6 < norms / expected < 4e-6
        expected -= norms
    assert counted == expected


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Degrees on `ranks`, and the sequences of each replica in each of two micro-batches."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    ranks: int = 64
    sequences: int = 1

    @property
    def text(self) -> str:
        words = ("tp", "cp", "ep", "etp", "zero")
        return "; ".join([*(f"{word} = {getattr(self, word)}" for word in words), "microbatches = 2"])


def expected_bytes(m: Model, way: Ways) -> dict[tuple[str, str], float]:
    """Bytes that a rank sends in a step by group and purpose, without those of zero bytes."""
    dp, edp = way.ranks // (way.tp * way.cp), way.ranks // (way.ep * way.etp)
    tokens = 2 * way.sequences * SEQUENCE
    rows = tokens // (way.cp * way.tp) * m.k
    # A row there and back, in both passes, with its weight in fp32 forward and that one's gradient backward.
    routed = m.mixtures * rows * (4 * m.dim * WIDTH + 2 * MASTER)
    found = {
        ("ep", "all_to_all of rows"): routed * _left(way.ep),
        ("etp", "gathered rows"): routed * (way.etp - 1),
        ("tp", "activations"): _sent_by_tp(m, way, tokens),
        ("cp", "activations"): _sent_by_cp(m, way, tokens),
    }
    experts = m.mixtures * m.experts * 3 * m.dim * m.hidden // (way.ep * way.etp)
    cut, whole = _dense_elements(m)
    shards = dp * way.cp
    _add_weights(found, way, "edp", edp, experts)
    name = "dp_cp" if way.cp > 1 else "dp"
    if way.zero:
        _add_weights(found, way, name, shards, cut // way.tp + whole, table=m.vocab * m.dim // way.tp)
        found["tp", "all_reduce of gradients"] = 2 * whole / shards * MASTER * _left(way.tp)
    elif way.tp > 1:
        _add_weights(found, way, name, shards, cut // way.tp)
        _add_weights(found, way, "dp_cp_tp", way.ranks, whole)
    else:
        _add_weights(found, way, name, shards, cut + whole)
    return {key: size for key, size in found.items() if size}


def _left(ranks: int) -> float:
    """What a rank sends of its part of a ring's tensor, or of its rows."""
    return (ranks - 1) / ranks


def _sent_by_tp(m: Model, way: Ways, tokens: int) -> float:
    """Sequences gathered and scattered around what is cut, in both passes; maximum, sum and label of the loss."""
    dense, _ = m.first
    if m.mla:
        q_rank, kv_rank, _, rope, _ = m.mla
        # Both narrow products are whole: their results travel. So do keys' rotated parts, whose gradients are summed.
        attention = 2 * m.dim + 2 * (q_rank + kv_rank) + rope + 2 * rope * way.cp
    else:
        attention = 4 * m.dim
    feed_forwards = (dense + (m.mixtures if m.shared else 0)) * 4 * m.dim
    widths = m.depth * attention + feed_forwards + 4 * m.dim
    return (tokens // way.cp * (widths * WIDTH + 3 * 2 * MASTER) + _loads(m)) * _left(way.tp)


def _sent_by_cp(m: Model, way: Ways, tokens: int) -> float:
    """Queries, keys, values and results change from tokens to heads and back, in both passes; the loss is summed."""
    keys = 0
    if m.mla:
        _, _, nope, rope, value = m.mla
        widths, keys = m.heads * (nope + rope + nope + 2 * value), 3 * rope
    else:
        widths = m.head_dim * 2 * (m.heads + m.kv_heads)
    of_layer = 2 * widths // way.tp * tokens // way.cp + keys * tokens
    return (m.depth * of_layer * WIDTH + 2 * MASTER + _loads(m)) * _left(way.cp)


def _loads(m: Model) -> int:
    """Whole tensors that a bias updated online sums over each axis: 8-byte counts of experts, there and back."""
    return m.mixtures * 2 * 8 * m.experts if m.has_bias else 0


def _dense_elements(m: Model) -> tuple[int, int]:
    """Elements that `tp` cuts, and those that each of its ranks has: norms, routers, narrow products of MLA."""
    dense, width = m.first
    cut = 2 * m.vocab * m.dim + 3 * m.dim * (dense * width + m.mixtures * m.shared)
    whole = m.dim + m.depth * 2 * m.dim + m.mixtures * m.dim * m.experts
    if m.mla:
        q_rank, kv_rank, nope, rope, value = m.mla
        cut += m.depth * m.heads * (q_rank * (nope + rope) + kv_rank * (nope + value) + value * m.dim)
        whole += m.depth * (m.dim * (q_rank + kv_rank + rope) + q_rank + kv_rank)
    else:
        cut += m.depth * m.dim * m.head_dim * 2 * (m.heads + m.kv_heads)
    return cut, whole


def _add_weights(
    found: dict[tuple[str, str], float], way: Ways, group: str, ranks: int, elements: int, table: int = 0
) -> None:
    """ZeRO 0 sums gradients once a step; 1 scatters and gathers once; 2 scatters for each micro-batch; 3 gathers for
    each pass of each as well, but for the embedding's table, which no backward pass reads."""
    sent = elements * _left(ranks)
    if way.zero == 0:
        found[group, "all_reduce of gradients"] = 2 * sent * MASTER
        return
    found[group, "reduce_scatter of gradients"] = sent * MASTER * (2 if way.zero > 1 else 1)
    gathers = 4 * sent - 2 * table * _left(ranks) if way.zero == 3 else sent
    found[group, "all_gather of weights"] = gathers * WIDTH


@each_row(
    ("name", "depth", "way"),
    [
        ("mixtral_8x22b", 3, Ways(ep=8)),
        ("mixtral_8x22b", 3, Ways(tp=2, ep=4, etp=2, zero=0)),
        ("mixtral_8x22b", 3, Ways(tp=4, cp=2, ep=8, zero=1, sequences=2)),
        ("mixtral_8x22b", 3, Ways(cp=4, ep=2, etp=4, zero=2)),
        ("mixtral_8x22b", 3, Ways(tp=8, ep=1, etp=8, zero=3)),
        ("deepseek_v3", 5, Ways(tp=2, ep=16, zero=0)),
        ("deepseek_v3", 5, Ways(tp=2, cp=2, ep=16, etp=2, zero=1)),
        ("deepseek_v3", 5, Ways(ep=64, zero=2, sequences=2)),
        ("deepseek_v3", 5, Ways(tp=4, cp=2, ep=32, zero=3)),
    ],
)
def test_bytes_sent_are_those_of_the_formulas(name: str, depth: int, way: Ways) -> None:
    m = replace(MODELS[name], depth=depth)
    batch = 2 * way.sequences * way.ranks // (way.tp * way.cp)
    flows = tallied(name, depth, way.ranks, batch, way.text).traffic
    found = {(re.sub(r"\[.*", "", flow.group), flow.purpose): flow.bytes for flow in flows}
    assert found == expected_bytes(m, way)
