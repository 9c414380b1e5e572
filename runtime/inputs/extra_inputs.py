"""A batch's inputs beside ids and labels: routes of a rollout, segments, padding. Checks, and inputs of `forward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from moec.passes.ir import Program, Role
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import Replay
from moec.passes.ir.roles import FREE_ROUTE
from moec.runtime.ranks.checks import Complaint

_MARKS: tuple[Role, Role] = ("segments", "real")
ROUTES = "give the `.routes` of a rollout of this model over this batch"
ASCENDING = "number the texts of a sequence as they follow each other, such as 0, 0, 1, 1, 1"
MARKS = "give bools `[batch, sequence]`, True for each token that is padding"
PADDING = "compile the file with `embedding = tokens(padding = given)`"
SEGMENTS = "compile the file with `embedding = tokens(segments = true)`"
REPLAY = "compile the file with `train { replay = true }`"


@dataclass(frozen=True, slots=True)
class ExtraInputs:
    """Tensors of one batch, each None where it is not given.

    `routes`: int64 `[batch, sequence, mixtures, k]`, the experts of each token, −1 for none. `segments`: int64
    `[batch, sequence]`, which text a token belongs to, not descending in a sequence. `padding`: bool or int64
    `[batch, sequence]`, True or 1 for each token that is padding.
    """

    routes: Tensor | None = None
    segments: Tensor | None = None
    padding: Tensor | None = None

    def by_name(self) -> dict[str, Tensor]:
        """The inputs that are not None, by the names of a model's arguments."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def parts(self, number: int) -> list[ExtraInputs]:
        """The parts of `number` micro-batches."""
        parts_by_name = {name: tensor.tensor_split(number) for name, tensor in self.by_name().items()}
        return [ExtraInputs(**{name: parts[index] for name, parts in parts_by_name.items()}) for index in range(number)]


NO_EXTRA_INPUTS = ExtraInputs()


@dataclass(frozen=True, slots=True)
class AcceptedInputs:
    """The extra inputs that a model's `forward` accepts.

    For each mixture whose choices can be given: its `experts`, its `k`, and the number of its layer.
    """

    experts: tuple[int, ...] = ()
    k: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    segments: bool = False
    padding: bool = False
    mixed: bool = False
    """Whether routes may have `FREE_ROUTE`, as `moec verify` gives them."""

    @classmethod
    def of(cls, program: Program) -> AcceptedInputs:
        """The extra inputs that the Program accepts."""
        forward = program.block(FORWARD)
        segments, padding = (forward.input(role) is not None for role in _MARKS)
        experts, k, layers = list[int](), list[int](), list[int]()
        for layer in program.layers:
            block = program.body(layer)
            for op in (op for op in block.ops if isinstance(op, Replay)):
                scores, choices, _ = block.operands(op)
                experts.append(cast(int, scores.shape[-1]))
                k.append(cast(int, choices.shape[-1]))
                layers.append(layer.number)
        return cls(tuple(experts), tuple(k), tuple(layers), segments, padding)

    def inputs(self, extra: ExtraInputs, tokens: Tensor) -> dict[Role, Tensor]:
        """The inputs of `forward` by role; missing ones get values without effect."""
        inputs: dict[Role, Tensor] = {}
        if self.k:
            free = tokens.new_full((), FREE_ROUTE).expand(*tokens.shape, len(self.k), max(self.k))
            inputs["routes"] = free if extra.routes is None else extra.routes
        if self.segments:
            single_text = tokens.new_zeros(()).expand(tokens.shape)
            inputs["segments"] = single_text if extra.segments is None else extra.segments
        if self.padding:
            inputs["real"] = self.real(extra, tokens)
        return inputs

    def real(self, extra: ExtraInputs, tokens: Tensor) -> Tensor:
        """0 for each token that `extra.padding` marks, else 1: int64 `[batch, sequence]`."""
        if extra.padding is None:
            return tokens.new_ones(()).expand(tokens.shape)
        return (extra.padding == 0).to(torch.int64)

    def complaint(self, extra: ExtraInputs, tokens: Tensor, *, reads_values: bool) -> Complaint | None:
        """The first error of `extra` beside valid `tokens`, or None.

        Without `reads_values` it reads no tensor's values.
        """
        if extra.routes is not None and (words := self._routes_complaint(extra.routes, tokens, reads_values)):
            return Complaint("MOE0726", words, ROUTES if self.k else REPLAY)
        if extra.segments is not None and (words := self._segments_complaint(extra.segments, tokens, reads_values)):
            return Complaint("MOE0727", words, ASCENDING if self.segments else SEGMENTS)
        if extra.padding is not None and (words := self._padding_complaint(extra.padding, tokens, reads_values)):
            return Complaint("MOE0728", words, MARKS if self.padding else PADDING)
        return None

    def _padding_complaint(self, padding: object, tokens: Tensor, reads_values: bool) -> str | None:
        if not self.padding:
            return "padding was given, and the model takes none"
        dtypes = {torch.bool: "torch.bool", torch.int64: "torch.int64 of 0 and 1"}
        if words := _mismatch(("marks of padding", padding), tokens.shape, "[batch, sequence]", tokens, dtypes):
            return words
        assert isinstance(padding, Tensor)
        if reads_values and padding.numel() and padding.dtype == torch.int64:
            low, high = (int(bound) for bound in padding.aminmax())
            if low < 0 or high > 1:
                return f"padding contains {low if low < 0 else high}, and is 1 for padding and 0 for other tokens"
        return None

    def _segments_complaint(self, segments: object, tokens: Tensor, reads_values: bool) -> str | None:
        if not self.segments:
            return "segments were given, and the model takes none"
        if words := _mismatch(("segments", segments), tokens.shape, "[batch, sequence]", tokens):
            return words
        assert isinstance(segments, Tensor)
        if reads_values and bool((segments[:, 1:] < segments[:, :-1]).any()):
            sequence = int((segments[:, 1:] < segments[:, :-1]).any(1).nonzero()[0])
            return f"segments descend in sequence {sequence} of the batch: the tokens of a text follow each other"
        return None

    def _routes_complaint(self, routes: object, tokens: Tensor, reads_values: bool) -> str | None:
        if not self.k:
            return "routes were given, and the plan cannot take any"
        shape = (*tokens.shape, len(self.k), max(self.k))
        if words := _mismatch(("routes", routes), shape, "[batch, sequence, mixtures, k]", tokens):
            return words
        assert isinstance(routes, Tensor)
        return self._route_values_complaint(routes) if reads_values and routes.numel() else None

    def _route_values_complaint(self, routes: Tensor) -> str | None:
        for mixture, (experts, k, layer) in enumerate(zip(self.experts, self.k, self.layers, strict=True)):
            choices, padding_choices = routes[:, :, mixture, :k], routes[:, :, mixture, k:]
            low, high = (int(bound) for bound in choices.aminmax())
            lowest = FREE_ROUTE if self.mixed else -1
            subject = f"routes of mixture {mixture} (layer {layer})"
            if low < lowest or high >= experts:
                invalid = (choices < lowest) | (choices >= experts)
                example = f"expert {int(choices[invalid][0])}{_first(invalid)}"
                return f"{subject} have {example}; experts are 0 to {experts - 1}, and -1 is none"
            extra_choices = (padding_choices != -1) & (padding_choices != lowest)
            if bool(extra_choices.any()):
                return f"{subject} have more than its {k} choices{_first(extra_choices)}: the others must be -1"
            ordered = choices.sort(-1)[0]
            duplicates = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
            if bool(duplicates.any()):
                return f"{subject} send a token to one expert twice{_first(duplicates)}"
        return None


def _first(wrong: Tensor) -> str:
    """Names the first token that `wrong` `[batch, sequence, …]` marks."""
    sequence, token = wrong.flatten(2).any(-1).nonzero()[0].tolist()
    return f" in sequence {sequence}, at token {token}"


def _mismatch(
    named: tuple[str, object],
    shape: Sequence[int],
    dims: str,
    tokens: Tensor,
    dtypes: Mapping[torch.dtype, str] = MappingProxyType({torch.int64: "torch.int64"}),
) -> str | None:
    """Describes why `named`, a plural name and a value, is no tensor of this shape, dtype and device; or None."""
    name, tensor = named
    if not isinstance(tensor, Tensor):
        return f"{name} are of class {type(tensor).__name__}, and must be a torch.Tensor"
    if tensor.dtype not in dtypes:
        return f"{name} are {tensor.dtype}, and must be {', or '.join(dtypes.values())}"
    if tensor.shape != torch.Size(shape):
        return f"{name} have shape {list(tensor.shape)}, and must be {dims} = {list(shape)}"
    if tensor.device != tokens.device:
        return f"{name} are on {tensor.device}, and tokens on {tokens.device}"
    return None
