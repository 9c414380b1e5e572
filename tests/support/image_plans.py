"""A small model of images for tests, written as a user would write it."""

from __future__ import annotations

from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.grammar import load_text
from moec.grammar.spec import Spec

CLASSES, CHANNELS, IMAGE, PATCH = 5, 2, 8, 2


def image_text(
    *,
    ranks: int = 1,
    tp: int = 1,
    ep: int = 1,
    zero: int = 0,
    sequence_parallel: bool = True,
    microbatches: int = 1,
    recompute: str = "none",
    dtype: str = "fp32",
    model: str = "",
    patches: str = "",
    attention: str = "mha(heads = 4, causal = false)",
    second: str | None = None,
    gate: str = "topk(2, normalize = true)",
    balance: str = "[switch_loss(0.1)]",
    beside: str = "",
    batch: int = 8,
    optimizer: str = "adamw(lr = 1e-3)",
    image: int = IMAGE,
    pool: str = "mean",
) -> str:
    """Layer 0 dense, layer 1 a mixture, both with `attention`, layer 1 with `second` if given."""
    return f"""\
model "vision" {{
  dim = 16; depth = 2; dtype = {dtype}; {model}
  embedding = patches(image = {image}, size = {PATCH}, channels = {CHANNELS}{patches})
  head = classes({CLASSES}{"" if pool == "mean" else f", pool = {pool}"})
  layers {{ attention = {attention}; ffn = gelu(32) }}
  layers 1 {{
    attention = {second or attention}
    moe {{ experts = 4 * swiglu(16); gate = {gate}; balance = {balance}; {beside} }}
  }}
}}
cluster "here" {{ device = cpu; level "node" {{ size = {ranks} }} }}
train {{ batch = {batch}; optimizer = {optimizer} }}
parallel {{
  tp = {tp}; ep = {ep}; zero = {zero}; sequence_parallel = {str(sequence_parallel).lower()}
  microbatches = {microbatches}; recompute = {recompute}
}}
"""


def image_spec(**options: object) -> Spec:
    """The Spec of `image_text(**options)`."""
    return load_text(image_text(**options), name="vision.moe").unwrap()  # type: ignore[arg-type]


def image_plan(**options: object) -> Plan:
    """The plan of `image_text(**options)`."""
    return compile_source(image_spec(**options))
