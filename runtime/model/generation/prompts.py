"""The prompts of `generate`: sequences of different lengths, each from place 0 on, and padding behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moec.runtime.errors import JobError, is_whole
from moec.runtime.inputs.batches import Limits

RUNS = "mark padding at the beginning or end of each prompt, not between tokens; each prompt needs at least one token"
LISTS = "give int64 [batch, sequence], or a list of int64 [length]"


@dataclass(frozen=True, slots=True)
class Prompts:
    """`ids` int64 `[batch, T]`, padded at the end to a multiple of `pieces`, and `lengths` int64 `[batch]` without it.

    `longest` is the largest length, `new` how many tokens follow, `room` the number of places that a cache needs,
    `fill` the id of padding. The ranks that share a sequence cut it into `pieces`.
    """

    ids: Tensor
    lengths: Tensor
    longest: int
    new: int
    room: int
    fill: int
    pieces: int = 1

    @property
    def even(self) -> bool:
        """Whether all prompts have one length. Reads values."""
        return not len(self.lengths) or int(self.lengths.amin()) == self.longest

    def real(self) -> Tensor:
        """1 for tokens of prompts, 0 for padding: int64 `[batch, T]`."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (places < self.lengths[:, None]).to(torch.int64)


def prompts_of(tokens: object, padding: object, limits: Limits, max_new_tokens: object) -> Prompts:
    """A user's prompts. Raises `JobError` for prompts that the model does not accept.

    `tokens`: int64 `[batch, sequence]`, or a list of int64 `[length]`. `padding`: bool or int64 `[batch, sequence]`,
    True or 1 at the beginning or the end of a prompt; the default is the positions of the model's padding id, if any.
    """
    if not is_whole(max_new_tokens) or max_new_tokens < 1:
        raise JobError("MOE0740", f"`max_new_tokens` is {max_new_tokens!r}, and must be a whole number, at least 1")
    fill = limits.padding if limits.padding is not None else 0
    ids, real = _padded_list(tokens, fill) if isinstance(tokens, list | tuple) else (tokens, None)
    if words := replace(limits, pieces=1).complaint(ids, None, reads_values=True):  # type: ignore[arg-type]
        raise JobError("MOE0702", words, LISTS)
    assert isinstance(ids, Tensor)
    if padding is not None:
        real = _real_tokens(padding, ids, in_list=real is not None)
    elif real is None and limits.padding is not None:
        real = ids != limits.padding
    if real is not None:
        ids, lengths = _left_aligned(ids, real, fill)
    else:
        lengths = ids.new_full(ids.shape[:1], ids.shape[1])
    longest, num_new = int(lengths.amax()) if len(lengths) else 0, max_new_tokens
    if len(lengths) and int(lengths.amin()) == 0:
        raise JobError("MOE0740", f"prompt {int(lengths.argmin())} has no token", RUNS)
    if longest + num_new > limits.context:
        words = f"the longest prompt has {longest} tokens, and with {num_new} new ones more than the model's context"
        raise JobError(
            "MOE0742",
            f"{words}, {limits.context} (`context` in the file, else `train.sequence`)",
            f"give `max_new_tokens` up to {limits.context - longest}"
            if longest < limits.context
            else "give shorter prompts",
        )
    pieces = limits.pieces
    width = -(-max(longest, 1) // pieces) * pieces
    ids = torch.nn.functional.pad(ids[:, :longest], (0, width - longest), value=fill)
    return Prompts(ids, lengths, longest, num_new, width + num_new + pieces, fill, pieces)


def _padded_list(tokens: list[object] | tuple[object, ...], fill: int) -> tuple[Tensor, Tensor]:
    """The prompts of a list with padding behind them, and a mask of real tokens."""
    rows = list[Tensor]()
    for index, row in enumerate(tokens):
        if not isinstance(row, Tensor) or row.dtype != torch.int64 or row.dim() != 1:
            raise JobError("MOE0702", f"prompt {index} is not an int64 tensor of one dimension", LISTS)
        rows.append(row)
    if not rows:
        raise JobError("MOE0702", "an empty list of prompts was given", LISTS)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    return ids, torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def _real_tokens(padding: object, ids: Tensor, *, in_list: bool) -> Tensor:
    """The mask of real tokens, from a user's `padding`."""
    fits = isinstance(padding, Tensor) and padding.shape == ids.shape and padding.dtype in (torch.bool, torch.int64)
    if in_list or not fits or not isinstance(padding, Tensor) or padding.device != ids.device:
        words = "`padding` must be bool or int64 [batch, sequence], of the shape and on the device of tokens"
        raise JobError("MOE0728", words if not in_list else "`padding` was given beside a list of prompts", LISTS)
    return padding == 0


def _left_aligned(ids: Tensor, real: Tensor, fill: int) -> tuple[Tensor, Tensor]:
    """Prompts moved to place 0, and their lengths."""
    places = torch.arange(ids.shape[1], device=ids.device)
    lengths = real.sum(1)
    first = real.to(torch.int64).argmax(1) if ids.shape[1] else lengths
    between = (places >= first[:, None]) & (places < (first + lengths)[:, None]) & ~real
    if bool(between.any()):
        raise JobError("MOE0740", f"prompt {int(between.any(1).nonzero()[0])} has padding between its tokens", RUNS)
    aligned = ids.gather(1, (first[:, None] + places).clamp_max(max(ids.shape[1] - 1, 0)))
    return torch.where(places < lengths[:, None], aligned, fill), lengths
