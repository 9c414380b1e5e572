"""Small models for comparisons with other implementations, as `.moe` text."""

from __future__ import annotations

from moec.driver import to_spec
from moec.grammar.spec import Spec

VOCAB, BATCH, SEQUENCE = 61, 3, 13


def small_spec(
    layers: str,
    *,
    dim: int = 24,
    depth: int = 2,
    norm: str = "rms(eps = 1e-5)",
    dtype: str = "fp32",
    embedding: str = "tokens()",
    ranks: int = 1,
    batch: int = BATCH,
) -> Spec:
    """A model whose `layers` blocks are `layers`."""
    return to_spec(f"""
        model "small" {{
          vocab = {VOCAB}; dim = {dim}; depth = {depth}; dtype = {dtype}; norm = {norm}
          embedding = {embedding}
          {layers}
        }}
        cluster "here" {{ device = cpu; level "process" {{ size = {ranks} }} }}
        train {{ batch = {batch}; sequence = {SEQUENCE} }}
    """)
