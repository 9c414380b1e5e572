"""`PlanModule.generate`: new tokens behind prompts, one after another, with a cache of earlier keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime import unscored
from moec.runtime.errors import JobError, is_whole
from moec.runtime.guards.every_guard import first_complaint, look_at
from moec.runtime.guards.guard import PassBegins, PassEnds, TokensChosen
from moec.runtime.inputs.batches import Limits, device_of
from moec.runtime.inputs.extra_inputs import NO_EXTRA_INPUTS
from moec.runtime.model.generation.decoder import Decoder, NewTokens, layers_of
from moec.runtime.model.generation.prompts import Prompts, prompts_of
from moec.runtime.model.generation.sampling import MOST_SEQUENCES, Sampling
from moec.runtime.ranks.checks import Complaint, MustMatch, SharedInputs

if TYPE_CHECKING:
    from moec.runtime.model.module import PlanModule

SITE = "generate"
OPTIONS = "ranks call `generate` with different options: give the same lengths, ends, seed and others on every rank"
SHAPES = "prompts have shapes from {least} to {most} on the ranks, and must have one: places of experts follow from it"
BATCHES = "ranks {one} and {other} draw tokens for batches of different sizes: give `sequences`, their numbers"


@dataclass(frozen=True, slots=True)
class Generated:
    """`tokens` int64 `[batch, new]`: the new tokens of each sequence, `pad` behind its end.

    `lengths` int64 `[batch]`: how many of them are the sequence's, the end among them. Iteration gives each sequence's
    new tokens, int64 `[length]`.
    """

    tokens: Tensor
    lengths: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return (row[:length] for row, length in zip(self.tokens, self.lengths.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Ends:
    """The runs of ids that end a sequence, and the id that pads it."""

    stops: tuple[tuple[int, ...], ...]
    pad: int

    @classmethod
    def of(cls, eos: object, stop: object, pad: object, vocab: int) -> Ends:
        """The ends of `generate`'s arguments. Raises `JobError` for values that are no ids."""
        if any(not isinstance(run, list | tuple) for run in _listed(stop)):
            help = "write `stop=[[32, 2]]` for the run 32, 2, and `eos=[32, 2]` for either of them"
            raise JobError("MOE0740", f"`stop` is {stop}, and must be a list of lists of ids", help)
        stops = [(token,) for token in _listed(eos)] + [tuple(_listed(run)) for run in _listed(stop)]
        pads = [] if pad is None else [(pad,)]
        if wrong := [run for run in (*stops, *pads) if not run or not all(_is_id(token, vocab) for token in run)]:
            help = f"`eos` is an id or several, `stop` a list of lists of ids, `pad` an id: 0 to {vocab - 1}"
            raise JobError("MOE0740", f"`eos`, `stop` or `pad` has {list(wrong[0])} in place of ids", help)
        ids = [tuple(token for token in run if is_whole(token)) for run in stops]
        first = ids[0][0] if _listed(eos) else 0
        return cls(tuple(ids), pad if is_whole(pad) else first)

    def reached(self, tokens: Tensor, count: int) -> Tensor:
        """Whether each sequence ends with the last of its first `count` new tokens `[batch, …]`: bool `[batch]`."""
        ended = tokens.new_zeros(len(tokens), dtype=torch.bool)
        for run in self.stops:
            if len(run) == 1:
                ended |= tokens[:, count - 1] == run[0]
            elif len(run) <= count:
                ended |= (tokens[:, count - len(run) : count] == torch.tensor(run, device=tokens.device)).all(1)
        return ended


@dataclass(frozen=True, slots=True)
class Request:
    """The checked arguments of `generate`. `sequences` int64 `[batch]`: the numbers of the sequences."""

    prompts: Prompts
    ends: Ends
    sampling: Sampling
    sequences: Tensor


def _listed(value: object) -> list[object]:
    """An argument as a list: None is empty, a single value a list of one."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _is_id(value: object, vocab: int) -> bool:
    return is_whole(value) and 0 <= value < vocab


@torch.no_grad()
def generate(
    model: PlanModule, tokens: object, max_new_tokens: object, padding: object, ends: tuple[object, object, object],
    sampling: Sampling, sequences: object,
) -> Generated:  # fmt: skip
    """`PlanModule.generate`, whose docstring describes it. `ends`: its `eos`, `stop` and `pad`."""
    model._home.require_running()
    request, complaint = None, None
    first = tokens[0] if isinstance(tokens, list | tuple) and tokens else tokens
    try:
        look_at(PassBegins(model, device_of(first).type))
        layers = layers_of(model, model._decoding.emitted())
        for weights in model.all_weights(wrapped=True):
            weights.needed()  # raises for replaced parameters
        assert isinstance(model.limits, Limits)
        prompts = prompts_of(tokens, padding, model.limits, max_new_tokens)
        sampling.require_valid()
        request_ends = Ends.of(*ends, model.limits.vocab)
        numbers = _numbers(prompts, sequences, model._home.data_rank)
        request = Request(prompts, request_ends, sampling, numbers)
    except JobError as error:
        complaint = Complaint.of(error)
    reads_values = model._home.checks.reads_values(model.seen, (SITE,), device_of(first))
    _agree(model, request, complaint, reads_values=reads_values, numbered=sequences is not None)
    assert request is not None
    decoder = Decoder(model, layers, request.prompts)
    try:
        with torch.inference_mode():  # operators take a third of the time less than under no_grad
            generated = _run(model, decoder, request, reads_values=reads_values)
    finally:
        decoder.close()
    with torch.inference_mode(False):  # tensors of inference mode cannot be used in training
        return Generated(generated.tokens.clone(), generated.lengths.clone())


def _numbers(prompts: Prompts, sequences: object, data_rank: int) -> Tensor:
    """The numbers of the sequences: `sequences`, or consecutive ones if all ranks have equal batches."""
    batch = len(prompts.lengths)
    if sequences is None:
        return torch.arange(data_rank * batch, (data_rank + 1) * batch, device=prompts.ids.device)
    fits = isinstance(sequences, Tensor) and sequences.dtype == torch.int64 and sequences.shape == (batch,)
    if not fits or not isinstance(sequences, Tensor) or bool(((sequences < 0) | (sequences >= MOST_SEQUENCES)).any()):
        raise JobError("MOE0740", f"`sequences` must be int64 [{batch}], numbers from 0 to {MOST_SEQUENCES - 1}")
    return sequences.to(prompts.ids.device)


def _agree(
    model: PlanModule, request: Request | None, complaint: Complaint | None, *, reads_values: bool, numbered: bool
) -> None:
    """Raises one rank's error on every rank, or a difference between them. A collective."""
    options, shape, batch, tensors = (0,) * 4, (0, 0), 0, list[Tensor | None]()
    if request is not None:
        prompts = request.prompts
        options = prompts.new, hash(request.ends.stops), request.ends.pad, hash(request.sampling.numbers())
        tensors = [prompts.ids, prompts.lengths, request.sequences]
        if model._places_by_shape:
            shape = (len(prompts.lengths), prompts.longest)
        if request.sampling.temperature > 0 and not numbered:
            batch = len(prompts.lengths)
    model._home.checks.require(
        SITE,
        complaint,
        MustMatch("MOE0740", OPTIONS, options),
        MustMatch("MOE0702", SHAPES, shape),
        MustMatch("MOE0740", BATCHES, (batch,)),
        inputs=SharedInputs(tuple(tensors), reads_values),
    )


def _run(model: PlanModule, decoder: Decoder, request: Request, *, reads_values: bool) -> Generated:
    """The loop: prompts, then one token of each sequence at a time, until all sequences of all ranks have ended."""
    prompts, ends, device = request.prompts, request.ends, request.prompts.ids.device
    tokens = prompts.ids.new_full((len(prompts.lengths), prompts.new), ends.pad)
    counts, done = torch.zeros_like(prompts.lengths), torch.zeros_like(prompts.lengths, dtype=torch.bool)
    same_lengths, extra = prompts.even, {}
    if model.draws:  # an input of such a model's graphs, which in evaluation draw nothing by it
        extra["sequences"] = request.sequences
    places = torch.arange(prompts.ids.shape[1], device=device).expand(prompts.ids.shape)
    new = NewTokens(prompts.ids, places, prompts.lengths - 1, prompts.real(), 0, prompts.ids.shape[1])
    for count in range(1, prompts.new + 1):
        with unscored.noting() as unscored_masks:
            logits = decoder.step(new, {**extra, **_without_effect(model, new.ids)})
        chosen = request.sampling.choose(logits, request.sequences, prompts.lengths + (count - 1))
        waits = reads_values or bool(ends.stops) or count == prompts.new  # a search for stops waits for the device
        complaint = first_complaint(PassEnds(unscored_masks, decoder.routers, reads_values=waits)) or first_complaint(
            TokensChosen((chosen < 0) & ~done, reads_values=waits)
        )
        chosen = chosen.where(~done, ends.pad).clamp_min(0)
        tokens[:, count - 1] = chosen
        counts += ~done
        if ends.stops:
            done |= ends.reached(tokens, count)
        unfinished = int((~done).sum()) if ends.stops else 1
        (unfinished,) = model._home.checks.require(SITE, complaint, counts=(unfinished,))
        if not unfinished or count == prompts.new:
            break
        new = _next(chosen, done, prompts, count, same_lengths=same_lengths)
    return Generated(tokens[:, :count], counts)


def _without_effect(model: PlanModule, ids: Tensor) -> dict[str, Tensor]:
    """Routes that leave gates free, of a model with `replay`."""
    return {"routes": model.takes.inputs(NO_EXTRA_INPUTS, ids)["routes"]} if model.takes.k else {}


def _next(chosen: Tensor, done: Tensor, prompts: Prompts, count: int, *, same_lengths: bool) -> NewTokens:
    """One more token of each sequence, which is padding behind its end, and padding up to `pieces`."""
    pieces = prompts.pieces
    ids = chosen.where(~done, prompts.fill)[:, None]
    real = (~done).to(torch.int64)[:, None]
    places = (prompts.lengths + (count - 1))[:, None]
    if pieces > 1:
        ids, real = F.pad(ids, (0, pieces - 1), value=prompts.fill), F.pad(real, (0, pieces - 1))
        places = places + torch.arange(pieces, device=places.device)
    first = prompts.longest + count - 1
    return NewTokens(ids, places, torch.zeros_like(chosen), real, first if same_lengths else -1, first + pieces)
