"""A model for generation, which `emit_decoding` makes and the runtime runs: graphs and their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from moec.passes.ir import Op, State, Table


@dataclass(frozen=True, slots=True)
class Rotation:
    """Tables of cosines and sines that a layer takes, for `width` dims, with the frequencies of the op `Rope`.

    `in_text`: by the token's position in its text, else by its place in the sequence. `halves`: the first half of whole
    heads turns with the second; then tables are as wide as heads, and the first half of the sines is negative.
    """

    theta: float
    width: int
    frequencies: tuple[float, ...]
    factor: float
    in_text: bool
    halves: bool


@dataclass(frozen=True, slots=True)
class CachedHeads:
    """The shape of one cache of keys, and of values, without sequences and places: kv heads on this rank, width."""

    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class DecodingLayer:
    """A layer's block for generation.

    `module(*inputs, layer, *settings, *states, *slots, *weights, places, begin, end, *tables, *caches)` gives the
    residual stream. `slots`: the tables of the block. `tables`: cosines and sines of each of `rotations`; `caches`:
    keys and values of each of `cached`.
    """

    module: nn.Module
    settings: tuple[str, ...]
    states: tuple[State, ...]
    slots: tuple[Table, ...]
    rotations: tuple[Rotation, ...]
    cached: tuple[CachedHeads, ...]
    routers: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class DecodingForward:
    """`forward` for generation: `module(*inputs)`, whose inputs `inputs` names.

    These are roles of inputs of `forward`, settings (`$seed`), and

    - `places`, `starts` int64 [B, T]: the place of a token in its sequence, and the place where its text begins;
    - `rows`, `last` int64 [B]: 0, 1, …, and the index of the new token whose logits are returned;
    - `weight`: returns parameter n, `parameters[n]`; called once before the parameter's first use;
    - `run`: runs layer n with its inputs, and returns the residual stream.

    `selects`: the module returns the logits of `last` alone, [B, vocab]; else all logits, [B, T, vocab].
    """

    module: nn.Module
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    selects: bool


@dataclass(frozen=True, slots=True)
class Decoding:
    """A model for generation: the graph of `forward`, and the blocks of layers by name."""

    forward: DecodingForward
    layers: Mapping[str, DecodingLayer]
    calls: tuple[str, ...]
    """The block of each layer."""
    separator: int | None
    """The id that ends a text, of a model that packs texts by one."""
