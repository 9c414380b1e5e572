"""Runs a model's graphs for generation, with the cache and the weights of one call of `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moec.codegen.emit import site_of
from moec.codegen.emit.decodable import Refusal, refusal
from moec.codegen.emit.decoding import Decoding, DecodingLayer, Rotation
from moec.codegen.emit.emit_decoding import emit_decoding
from moec.passes.fuse import Fuse
from moec.passes.ir import REPLICATED, Program
from moec.passes.ir.interface import FORWARD
from moec.runtime.backends.torch.torch_rope import rope_tables
from moec.runtime.errors import JobError
from moec.runtime.inputs.settings import setting_values
from moec.runtime.model.generation.prompts import Prompts
from moec.runtime.model.plan_layer import Layer, layer_inside
from moec.runtime.ops.dense_collectives import whole_along
from moec.runtime.weights.weights import Weights

if TYPE_CHECKING:
    from moec.runtime.model.module import PlanModule


class DecodingGraphs:
    """A model's graphs for generation, emitted by its first `generate`. Copies of a model use the same ones."""

    def __init__(self, program: Program, groups: str, *, float64: bool) -> None:
        self._program, self._groups, self._float64 = program, groups, float64
        self._decoding: Decoding | None = None
        self._refused: Refusal | None = None
        self._layout = program.block(FORWARD).output_values()[0].layout or REPLICATED

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodingGraphs:
        return self

    def whole_along(self, dim: int, logits: Tensor) -> Tensor:
        """Logits [batch, sequence, vocab] gathered along a dim that ranks cut."""
        return whole_along(logits, self._layout, (dim,), self._groups, "logits")

    def emitted(self) -> Decoding:
        """The graphs. Raises `JobError` for a model that cannot generate."""
        if self._decoding is None:
            self._refused = self._refused or refusal(self._program)
            if self._refused is not None:
                raise JobError(
                    "MOE0741",
                    f"{self._refused.place} has {self._refused.reason}",
                    "a token must follow from the tokens before it alone; `model(tokens).logits` takes whole sequences",
                )
            # The unsharded model of a file was never fused.
            self._decoding = emit_decoding(Fuse().apply(self._program), groups=self._groups, float64=self._float64)
        return self._decoding


class NewTokens(NamedTuple):
    """T new tokens of each of B sequences, int64 each.

    `ids` [B, T], `places` [B, T] in their sequences, `last` [B] the index of the token whose logits are computed,
    `real` [B, T] 1 for tokens that are no padding. `begin` is the first place if all sequences have the same, else −1;
    `end` is more than every place.
    """

    ids: Tensor
    places: Tensor
    last: Tensor
    real: Tensor
    begin: int
    end: int


class Decoder:
    """The cache and the weights of a model for some prompts; `layers`: of `layers_of`.

    Made inside of `torch.no_grad`. Weights are cast and gathered once; those that ZeRO 3 cuts, at each use.
    """

    def __init__(self, model: PlanModule, layers: Sequence[Layer], prompts: Prompts) -> None:
        self._model, self._graphs, self._decoding = model, model._decoding, model._decoding.emitted()
        self._room, self._batch, self._device = prompts.room, len(prompts.lengths), prompts.ids.device
        blocks = [self._decoding.layers[name] for name in self._decoding.calls]
        self._top = _TopWeights(model, self._decoding.forward.parameters)
        self._layers = [_DecoderLayer(layer, block) for layer, block in zip(layers, blocks, strict=True)]
        self.routers = [site_of(op, number) for number, block in enumerate(blocks) for op in block.routers]
        self._caches: list[list[Tensor]] = []
        self._rows = torch.arange(self._batch, device=self._device)
        self._text_starts = torch.zeros(self._batch, dtype=torch.int64, device=self._device)  # of the next token's text
        self._rotations = tuple(dict.fromkeys(rotation for block in blocks for rotation in block.rotations))

    def step(self, new: NewTokens, extra: Mapping[str, Tensor]) -> Tensor:
        """Logits [B, vocab] after the `last` token of each sequence; `extra` has other inputs of `forward` by role.

        A collective of the ranks that share a mixture, heads or weights.
        """
        starts = self._starts(new)
        tables: dict[Rotation, tuple[Tensor, Tensor]] = {}

        def run(number: int, *inputs: Tensor) -> Tensor:
            if not tables:
                tables.update({r: self._rotation_tables(r, new, starts, inputs[0].dtype) for r in self._rotations})
            return self._run(number, inputs, new, tables)

        graph_inputs: dict[str, Any] = {**extra, "tokens": new.ids, "real": new.real, "places": new.places}
        graph_inputs |= {"starts": starts, "last": new.last, "rows": self._rows, "weight": self._top.weight, "run": run}
        forward = self._decoding.forward
        names = [name[1:] for name in forward.inputs if name.startswith("$")]
        settings = setting_values(names, self._model.settings, training=False)
        graph_inputs.update({f"${name}": value for name, value in zip(names, settings, strict=True)})
        self._top.begin()
        logits: Tensor = forward.module(*(graph_inputs[name] for name in forward.inputs))
        return self._last_logits(logits, new)

    def _run(
        self, number: int, inputs: Sequence[Tensor], new: NewTokens, tables: Mapping[Rotation, tuple[Tensor, Tensor]]
    ) -> Tensor:
        if not self._caches:
            self._caches = [self._empty(layer.block, inputs[0].dtype) for layer in self._layers]
        layer = self._layers[number]
        fixed = layer.fixed_inputs()
        if number + 1 < len(self._layers):
            self._layers[number + 1].begin()
        tables_of_layer = (table for rotation in layer.block.rotations for table in tables[rotation])
        caches = self._caches[number]
        y: Tensor = layer.block.module(*inputs, *fixed, new.places, new.begin, new.end, *tables_of_layer, *caches)
        return y

    def _empty(self, block: DecodingLayer, dtype: torch.dtype) -> list[Tensor]:
        """Keys and values of every attention of a layer. Zeros: weights of 0 times NaN would be NaN."""
        shapes = [(self._batch, cached.heads, self._room, cached.width) for cached in block.cached for _ in range(2)]
        return [torch.zeros(shape, dtype=dtype, device=self._device) for shape in shapes]

    def _starts(self, new: NewTokens) -> Tensor:
        """The place where each new token's text begins, [B, T]: after the last separator before the token."""
        separator = self._decoding.separator
        if separator is None:
            return self._text_starts[:, None].expand(new.places.shape)
        separator_ends = torch.where(new.ids == separator, new.places + 1, 0)
        starts = torch.cat([self._text_starts[:, None], separator_ends], 1).cummax(1).values
        self._text_starts = starts.gather(1, new.last[:, None] + 1)[:, 0]
        return starts[:, :-1].contiguous()

    def _rotation_tables(
        self, rotation: Rotation, new: NewTokens, starts: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the new tokens, [B or 1, T, 1, pairs], or twice as wide where halves of heads turn."""
        table_dtype = torch.promote_types(dtype, torch.float32)
        tables = rope_tables(
            self._room, rotation.width, rotation.theta, table_dtype, self._device, rotation.frequencies, rotation.factor
        )
        restarts = rotation.in_text and self._decoding.separator is not None
        if new.begin >= 0 and not restarts:
            cos, sin = (table[new.begin : new.begin + new.ids.shape[1]][None] for table in tables)
        else:
            cos, sin = (table[new.places - starts if restarts else new.places] for table in tables)
        return (torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)) if rotation.halves else (cos, sin)

    def _last_logits(self, logits: Tensor, new: NewTokens) -> Tensor:
        """The logits over the whole vocabulary of each sequence's `last` token."""
        if not self._decoding.forward.selects:
            logits = self._graphs.whole_along(1, logits)[self._rows, new.last]
        return self._graphs.whole_along(2, logits[:, None])[:, 0]

    def close(self) -> None:
        """Drops prefetched gathers that no use has taken."""
        for weights in self._model.all_weights(wrapped=True):
            weights.drop_prepared()


class _TopWeights:
    """The parameters of the top level, by number. Those that ZeRO 3 cuts are gathered at their first use in a step."""

    def __init__(self, model: PlanModule, names: Sequence[str]) -> None:
        top_weights = model.tops[0].weights
        self._weights_of = {spec.name: (weights, i) for weights in top_weights for i, spec in enumerate(weights.specs)}
        self._names = names
        self._kept_weights: dict[Weights, Sequence[Tensor]] = {w: w() for w in top_weights if not w.gathers_per_use}
        self._step_weights: dict[Weights, Sequence[Tensor]] = {}

    def begin(self) -> None:
        """A step begins."""
        self._step_weights = dict(self._kept_weights)

    def weight(self, number: int) -> Tensor:
        """The whole weight, or this rank's part."""
        weights, index = self._weights_of[self._names[number]]
        if weights not in self._step_weights:
            self._step_weights[weights] = weights()
        return self._step_weights[weights][index]


class _DecoderLayer:
    """A layer, and the inputs of its block that are the same in every step."""

    def __init__(self, layer: Layer, block: DecodingLayer) -> None:
        self.block, self._weights = block, layer._weights
        settings = setting_values(block.settings, {}, training=False)
        self._inputs_before_weights = (layer._number, *settings, *layer.states().values(), *layer.tables())
        self._fixed_inputs = None if self._weights.gathers_per_use else (*self._inputs_before_weights, *self._weights())

    def begin(self) -> None:
        """Starts the gather of the next use."""
        if self._fixed_inputs is None:
            self._weights.prefetch()

    def fixed_inputs(self) -> tuple[Tensor, ...]:
        """The layer's number, settings, states and weights."""
        return self._fixed_inputs or (*self._inputs_before_weights, *self._weights())


def layers_of(model: PlanModule, decoding: Decoding) -> list[Layer]:
    """The model's layers, without wrappers, whose hooks generation does not call.

    Raises `JobError` for a user's module in a layer's place.
    """
    if len(model.layers) != len(decoding.calls):
        words = f"the model has {len(model.layers)} layers, and its plan {len(decoding.calls)}"
        raise JobError("MOE0710", words, "the file fixes the number of layers")
    layers = []
    for number, module in enumerate(model.layers):
        if (layer := layer_inside(module)) is None:
            raise JobError(
                "MOE0741",
                f"layer {number} was replaced by a module of class {type(module).__name__}, which keeps no cache",
                "generate before layers are replaced; `model(tokens).logits` runs any module",
            )
        layers.append(layer)
    return layers
