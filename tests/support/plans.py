"""Small models for many tests, written as a user would write them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.spec import Spec

GATE = "topk(2, normalize = true)"
BALANCE = "[switch_loss(0.01), z_loss(1e-3)]"
BODY = "layers[1..2]"
"""The block of the layers with a mixture, of `depth` 3."""


FOUR = 'level "node" { size = 2; bandwidth = 4GB/s }; level "rail" { size = 2; bandwidth = 1GB/s }'
"""Levels of four ranks, in two nodes."""


def moe_text(
    *,
    ranks: int = 4,
    ep: int | None = 2,
    dp: int | None = None,
    tp: int | None = None,
    cp: int | None = None,
    etp: int | None = None,
    zero: int = 0,
    sequence_parallel: bool = True,
    experts: int = 8,
    expert: str = "swiglu(16)",
    gate: str = GATE,
    ffn: str = "gelu(32)",
    beside: str = "",
    attention: str | None = None,
    bias: str = "none",
    qk_norm: str | None = None,
    model: str = "",
    balance: str = BALANCE,
    dim: int = 16,
    depth: int = 3,
    dtype: str = "fp32",
    batch: int = 8,
    sequence: int = 8,
    optimizer: str = "adamw(lr = 1e-3)",
    mixtures: tuple[tuple[int, int | None], ...] = (),
    layers: Sequence[str] = (),
    microbatches: int | None = None,
    recompute: str = "",
    memory: str = "",
    levels: str = "",
    adapt: str = "",
) -> str:
    """Layer 0 dense with mha and `ffn`, the others gqa with rope and a mixture; one level of `ranks` CPU ranks.

    `memory`: of a device of its own, for models that do not fit the library's `cpu`. `levels`: the cluster's own.
    `recompute` is a word for all layers, or blocks such as `layers 1 { recompute = layer }`.
    `attention` is the whole call of layers 1, 2, …; without it, `gqa` with `bias` and `qk_norm`.
    `mixtures` gives the experts and the `ep` (None for that of the whole block) of layers 1, 2, …, and so the depth.
    So does `layers` with other words of their blocks, such as `moe { gate = switch }`.
    """
    depth = max(len(mixtures), len(layers)) + 1 if mixtures or layers else depth
    stated: dict[str, object] = {
        "dp": dp,
        "tp": tp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "zero": zero or None,
        "microbatches": microbatches,
    }
    stated["sequence_parallel"] = None if sequence_parallel else "false"
    degrees = "".join(f"  {name} = {value}\n" for name, value in stated.items() if value is not None)
    if recompute:
        degrees += f"  {recompute}\n" if "{" in recompute else f"  recompute = {recompute}\n"
    norm = "" if qk_norm is None else f", qk_norm = {qk_norm}"
    attention = attention or f"gqa(heads = 4, kv_heads = 2, rope = rope(theta = 1e4), bias = {bias}{norm})"
    others, levels = "", levels or f'level "node" {{ size = {ranks} }}'
    for number, (count, degree) in enumerate(mixtures, start=1):
        others += f"  layers {number} {{ moe {{ experts = {count} * {expert} }} }}\n" if count != experts else ""
        degrees += f"  layers {number} {{ ep = {degree} }}\n" if degree is not None else ""
    others += "".join(f"  layers {number} {{ {words} }}\n" for number, words in enumerate(layers, start=1))
    return f"""\
model "tiny" {{
  vocab = 32
  dim   = {dim}
  depth = {depth}
  dtype = {dtype}; {model}
  layers {{ attention = mha(heads = 4); ffn = {ffn} }}
  layers 1..{depth - 1} {{
    attention = {attention}
    moe {{
      experts = {experts} * {expert}
      gate    = {gate}
      balance = {balance}; {beside}
    }}
  }}
{others}}}
cluster "here" {{ device = {"roomy" if memory else "cpu"}; {levels} }}
train {{ batch = {batch}; sequence = {sequence}; optimizer = {optimizer} }}
parallel {{
{degrees}}}
{f"adapt {{ placement = {adapt} }}" if adapt else ""}
{f'device "roomy" {{ kind = cpu; memory = {memory}; bandwidth = 10GB/s }}' if memory else ""}"""


def moe_spec(**options: object) -> Spec:
    """The Spec of `moe_text(**options)`."""
    return load_text(moe_text(**options), name="tiny.moe").unwrap()  # type: ignore[arg-type]


def moe_plan(**options: Any) -> Plan:
    """The plan of `moe_text(**options)`, compiled once for tests that follow each other: nothing changes a plan."""
    return _compiled(moe_text(**options))


@lru_cache(maxsize=64)
def _compiled(text: str) -> Plan:
    return compile_source(load_text(text, name="tiny.moe").unwrap())


def layer_text(
    *,
    ranks: int | None = 4,
    ep: int | None = None,
    experts: int = 8,
    expert: str = "swiglu(16)",
    gate: str = GATE,
    beside: str = "",
    balance: str = BALANCE,
    dim: int = 16,
    dtype: str = "fp32",
    tail: str = "",
) -> str:
    """A `layer` file; `ranks` None leaves out the cluster."""
    cluster = "" if ranks is None else f'cluster "here" {{ device = cpu; level "node" {{ size = {ranks} }} }}\n'
    degrees = "" if ep is None else f"parallel {{ ep = {ep} }}\n"
    return f"""\
layer "ffn" {{
  dim   = {dim}
  dtype = {dtype}
  moe {{
    experts = {experts} * {expert}
    gate    = {gate}
    balance = {balance}; {beside}
  }}
}}
{cluster}{degrees}{tail}"""


def layer_spec(**options: object) -> Spec:
    """The Spec of `layer_text(**options)`."""
    return load_text(layer_text(**options), name="ffn.moe").unwrap()  # type: ignore[arg-type]


def layer_plan(**options: object) -> Plan:
    """The plan of `layer_text(**options)`."""
    return compile_source(layer_spec(**options))
