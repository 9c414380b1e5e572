"""The operators of generation compute what those of training compute, a few tokens at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_few import FEW
from moec.runtime.backends.torch.torch_rope import rope_tables
from moec.runtime.ops import cached_attention, masked_attention, mixture_mlp, mixture_of_few, rope, turn


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def cached(q: Tensor, k: Tensor, v: Tensor, prompts: Tensor, piece: int, **how: Any) -> tuple[Tensor, Tensor]:
    """Attention first of prompts with padding behind, then of `piece` tokens at a time; and how many tokens got it."""
    batch, tokens, _, width = q.shape
    room, longest = tokens + piece, int(prompts.max())
    caches = [torch.zeros(batch, k.shape[2], room, width, dtype=q.dtype) for _ in range(2)]
    found, starts = torch.zeros_like(q), how.pop("starts")

    def attend(places: Tensor, begin: int, end: int) -> None:
        rows = torch.arange(batch)[:, None]
        of_texts = None if starts is None else starts[rows, places]
        new = (x[rows, places] for x in (q, k, v))
        beside = how["sinks"], begin, end, how["window"], 0.3
        found[rows, places] = cached_attention(*new, *caches, places, of_texts, *beside)

    attend(torch.arange(longest).expand(batch, longest), 0, longest)
    done, even = prompts.clone(), bool((prompts == longest).all())
    while int(done.max()) + piece <= tokens:
        attend(done[:, None] + torch.arange(piece), int(done[0]) if even else -1, int(done.max()) + piece)
        done += piece
    return found, done


def test_a_token_does_not_see_places_behind_its_own() -> None:
    torch.manual_seed(0)
    keys, values = randn(2, 2, 9, 6), randn(2, 2, 9, 6)
    q, k, v = randn(2, 1, 4, 6), randn(2, 1, 2, 6), randn(2, 1, 2, 6)
    places = torch.full((2, 1), 5)
    near, far = (
        cached_attention(q, k, v, keys.clone(), values.clone(), places, None, None, 5, end, 0, 0.3) for end in (6, 9)
    )
    torch.testing.assert_close(near, far, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("prompts", [[7, 7, 7], [7, 4, 5], [1, 1, 1]])
@pytest.mark.parametrize("piece", [1, 2])
def test_attention_by_pieces_is_that_of_whole_sequences(
    window: int, sinks: bool, texts: bool, prompts: list[int], piece: int
) -> None:
    torch.manual_seed(0)
    q, k, v = randn(3, 11, 4, 6), randn(3, 11, 2, 6), randn(3, 11, 2, 6)
    starts = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 8, 8, 8]]).repeat(3, 1) if texts else None
    learned = randn(4) if sinks else None
    expected = masked_attention(q, k, v, learned, starts, None, True, window, 0.3)[0]
    found, done = cached(q, k, v, torch.tensor(prompts), piece, starts=starts, sinks=learned, window=window)
    for sequence, length in enumerate(done.tolist()):
        assert length > prompts[sequence]
        torch.testing.assert_close(found[sequence, :length], expected[sequence, :length], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_by_given_tables_is_rope(dtype: torch.dtype) -> None:
    x, positions = randn(2, 3, 4, 8, dtype=dtype), torch.tensor([[0, 1, 2], [1, 0, 2]])
    cos, sin = (table[positions] for table in rope_tables(3, 8, 100.0, torch.float32, torch.device("cpu")))
    expected = rope(x, positions, 100.0)
    assert torch.equal(turn(x, cos, sin, 0, False), expected)
    assert torch.equal(turn(x, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), 0, False), expected)
    few = [table[positions] for table in rope_tables(3, 4, 100.0, torch.float32, torch.device("cpu"))]
    assert torch.equal(turn(x, *few, 2, True), rope(x, positions, 100.0, 2, 4, True))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 1, 4), (2, 2, 1), (FEW, 2, 2), (1, 1, 6)])
@pytest.mark.parametrize("some", [False, True])
def test_few_tokens_get_the_mixture_of_many(
    activation: str, biases: bool, shape: tuple[int, int, int], some: bool
) -> None:
    torch.manual_seed(1)
    experts = torch.rand(*shape[:2], 6).argsort(-1)[..., : shape[2]]
    if some:
        experts = experts.where(experts % 3 != 0, -1)
    parts = 2 if activation == "swiglu" else 1
    up, down = randn(6, parts, 5, 7), randn(6, 7, 5)
    of_up, of_down = (randn(6, parts, 5), randn(6, 7)) if biases else (None, None)
    given = randn(*shape[:2], 7), experts, randn(*shape), up, down, of_up, of_down, activation, None, None
    torch.testing.assert_close(mixture_of_few(*given), mixture_mlp(*given)[0], rtol=1e-12, atol=1e-12)


def test_few_tokens_of_no_expert_get_nothing_and_wrong_experts_are_refused() -> None:
    x, weights, up, down = randn(1, 1, 7), randn(1, 1, 2), randn(6, 2, 5, 7), randn(6, 7, 5)
    none = torch.full((1, 1, 2), -1)
    assert not mixture_of_few(x, none, weights, up, down, None, None, "swiglu", None, None).any()
    with pytest.raises(RuntimeError, match="from -1 to 5"):
        mixture_of_few(x, none + 7, weights, up, down, None, None, "swiglu", None, None)
