"""What a batch has beside ids and labels: routes of a rollout, segments, padding. Checks, and inputs of `forward`."""

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
class Beside:
    """Tensors of one batch, each None where it is not given.

    `routes`: int64 `[batch, sequence, mixtures, k]`, the experts of each token, −1 for none. `segments`: int64
    `[batch, sequence]`, which text a token belongs to, not descending in a sequence. `padding`: bool or int64
    `[batch, sequence]`, True or 1 for each token that is padding.
    """

    routes: Tensor | None = None
    segments: Tensor | None = None
    padding: Tensor | None = None

    def given(self) -> dict[str, Tensor]:
        """What is given, by the names of a model's arguments."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def parts(self, number: int) -> list[Beside]:
        """The parts of `number` micro-batches."""
        cut = {name: tensor.tensor_split(number) for name, tensor in self.given().items()}
        return [Beside(**{name: parts[index] for name, parts in cut.items()}) for index in range(number)]


NOTHING = Beside()


@dataclass(frozen=True, slots=True)
class Takes:
    """What a model's `forward` takes beside ids.

    Of each mixture whose choices can be given: its `experts`, its `k`, and the number of its layer.
    """

    experts: tuple[int, ...] = ()
    k: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    segments: bool = False
    padding: bool = False
    mixed: bool = False
    """Whether routes may have `FREE_ROUTE`, as `moec verify` gives them."""

    @classmethod
    def of(cls, program: Program) -> Takes:
        """What the Program takes."""
        forward = program.block(FORWARD)
        segments, padding = (forward.input(role) is not None for role in _MARKS)
        experts, k, layers = list[int](), list[int](), list[int]()
        for layer in program.layers:
            block = program.body(layer)
            for op in (op for op in block.ops if isinstance(op, Replay)):
                scores, own, _ = block.operands(op)
                experts.append(cast(int, scores.shape[-1]))
                k.append(cast(int, own.shape[-1]))
                layers.append(layer.number)
        return cls(tuple(experts), tuple(k), tuple(layers), segments, padding)

    def inputs(self, beside: Beside, tokens: Tensor) -> dict[Role, Tensor]:
        """The inputs of `forward` by role; what is not given gets values without effect."""
        found: dict[Role, Tensor] = {}
        if self.k:
            free = tokens.new_full((), FREE_ROUTE).expand(*tokens.shape, len(self.k), max(self.k))
            found["routes"] = free if beside.routes is None else beside.routes
        if self.segments:
            one = tokens.new_zeros(()).expand(tokens.shape)
            found["segments"] = one if beside.segments is None else beside.segments
        if self.padding:
            found["real"] = self.real(beside, tokens)
        return found

    def real(self, beside: Beside, tokens: Tensor) -> Tensor:
        """1 for each token that is no given padding, else 0: int64 `[batch, sequence]`."""
        if beside.padding is None:
            return tokens.new_ones(()).expand(tokens.shape)
        return (beside.padding == 0).to(torch.int64)

    def complaint(self, beside: Beside, tokens: Tensor, *, look: bool) -> Complaint | None:
        """The first error of what is given for valid `tokens`, or None. Without `look` it reads no tensor's values."""
        if beside.routes is not None and (words := self._of_routes(beside.routes, tokens, look)):
            return Complaint("MOE0726", words, ROUTES if self.k else REPLAY)
        if beside.segments is not None and (words := self._of_segments(beside.segments, tokens, look)):
            return Complaint("MOE0727", words, ASCENDING if self.segments else SEGMENTS)
        if beside.padding is not None and (words := self._of_padding(beside.padding, tokens, look)):
            return Complaint("MOE0728", words, MARKS if self.padding else PADDING)
        return None

    def _of_padding(self, padding: object, tokens: Tensor, look: bool) -> str | None:
        if not self.padding:
            return "padding was given, and the model takes none"
        dtypes = {torch.bool: "torch.bool", torch.int64: "torch.int64 of 0 and 1"}
        if words := _unlike(("marks of padding", padding), tokens.shape, "[batch, sequence]", tokens, dtypes):
            return words
        assert isinstance(padding, Tensor)
        if look and padding.numel() and padding.dtype == torch.int64:
            low, high = (int(bound) for bound in padding.aminmax())
            if low < 0 or high > 1:
                return f"padding contains {low if low < 0 else high}, and is 1 for padding and 0 for other tokens"
        return None

    def _of_segments(self, segments: object, tokens: Tensor, look: bool) -> str | None:
        if not self.segments:
            return "segments were given, and the model takes none"
        if words := _unlike(("segments", segments), tokens.shape, "[batch, sequence]", tokens):
            return words
        assert isinstance(segments, Tensor)
        if look and bool((segments[:, 1:] < segments[:, :-1]).any()):
            sequence = int((segments[:, 1:] < segments[:, :-1]).any(1).nonzero()[0])
            return f"segments descend in sequence {sequence} of the batch: the tokens of a text follow each other"
        return None

    def _of_routes(self, routes: object, tokens: Tensor, look: bool) -> str | None:
        if not self.k:
            return "routes were given, and the plan cannot take any"
        wanted = (*tokens.shape, len(self.k), max(self.k))
        if words := _unlike(("routes", routes), wanted, "[batch, sequence, mixtures, k]", tokens):
            return words
        assert isinstance(routes, Tensor)
        return self._of_values(routes) if look and routes.numel() else None

    def _of_values(self, routes: Tensor) -> str | None:
        for mixture, (experts, k, layer) in enumerate(zip(self.experts, self.k, self.layers, strict=True)):
            own, beyond = routes[:, :, mixture, :k], routes[:, :, mixture, k:]
            low, high = (int(bound) for bound in own.aminmax())
            least = FREE_ROUTE if self.mixed else -1
            of_mixture = f"routes of mixture {mixture} (layer {layer})"
            if low < least or high >= experts:
                wrong = (own < least) | (own >= experts)
                found = f"expert {int(own[wrong][0])}{_first(wrong)}"
                return f"{of_mixture} have {found}; experts are 0 to {experts - 1}, and -1 is none"
            more = (beyond != -1) & (beyond != least)
            if bool(more.any()):
                return f"{of_mixture} have more than its {k} choices{_first(more)}: the others must be -1"
            ordered = own.sort(-1)[0]
            twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
            if bool(twice.any()):
                return f"{of_mixture} send a token to one expert twice{_first(twice)}"
        return None


def _first(wrong: Tensor) -> str:
    """The first token `[batch, sequence, …]` of which something is wrong."""
    sequence, token = wrong.flatten(2).any(-1).nonzero()[0].tolist()
    return f" in sequence {sequence}, at token {token}"


def _unlike(
    named: tuple[str, object],
    shape: Sequence[int],
    dims: str,
    tokens: Tensor,
    dtypes: Mapping[torch.dtype, str] = MappingProxyType({torch.int64: "torch.int64"}),
) -> str | None:
    """How something with a plural name is no tensor of this shape and dtype on the tokens' device, or None."""
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
