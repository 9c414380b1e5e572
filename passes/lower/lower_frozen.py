"""Marks the parameters of the parts that `train { frozen = … }` names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from moec.grammar.spec import ModelPart
from moec.passes.ir import Block

PARTS: Mapping[ModelPart, Sequence[str]] = {
    "embedding": ("embedding", "positions", "class_token"),
    "attention": ("attention",),
    "norms": ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm", "norm"),
    "ffn": ("ffn",),
    "experts": ("moe.experts",),
    "gate": ("moe.gate", "moe.coefficient", "moe.shared_gate"),
    "shared": ("moe.shared",),
    "residual": ("moe.residual",),
    "head": ("head",),
}
"""The prefixes of the names of each part's parameters. The weights of `residual` and `shared` belong to `gate`."""


def part_of(name: str) -> ModelPart:
    """The part that the parameter `name` of a block belongs to."""
    return next(part for part, prefixes in PARTS.items() for words in prefixes if f"{name}.".startswith(f"{words}."))


def freeze(blocks: Sequence[Block], frozen: Iterable[ModelPart]) -> list[Block]:
    """The blocks with the parameters of the parts `frozen` marked."""
    parts = set(frozen)
    if not parts:
        return list(blocks)
    return [
        replace(b, parameters=tuple(replace(p, frozen=part_of(p.name) in parts) for p in b.parameters)) for b in blocks
    ]
