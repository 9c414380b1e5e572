"""`sink_attention` against its definition, and the two ways to compute it against each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moec.runtime import ops
from moec.runtime.ops.sink_attention import attend_to_sink_token

BATCH, SEQUENCE, HEADS, WIDTH = 2, 11, 4, 6
Given = tuple[Tensor, Tensor, Tensor, Tensor]


def given(kv_heads: int, dtype: torch.dtype = torch.float64, batch: int = BATCH) -> Given:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(batch, SEQUENCE, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]
    q, k, v, sinks = (torch.randn(shape, generator=generator, dtype=dtype) for shape in (*shapes, (HEADS,)))
    return q, k, v, sinks


def definition(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Each score and the sink in one softmax, the sink's weight thrown away."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) * scale).masked_fill(~mask, -math.inf)
    with_sinks = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhij,bjhd->bihd", with_sinks.softmax(-1)[..., :-1], v)


def masks() -> dict[str, tuple[Tensor, tuple[Tensor | None, bool]]]:
    """What is visible, and how the operator is told."""
    all_of_them = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    band = all_of_them.tril() & ~all_of_them.tril(-3)
    texts = torch.cat([band, all_of_them.tril()])
    return {
        "causal": (all_of_them.tril(), (None, True)),
        "all": (all_of_them, (None, False)),
        "window": (band, (band, False)),
        "of each sequence": (texts, (texts, False)),
    }


def results(compute: object, given: Given, *how: object) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = compute(*leaves, *how)  # type: ignore[operator]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return [out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", masks())
def test_weights_are_a_softmax_over_scores_and_the_sink(kind: str, kv_heads: int) -> None:
    mask, how = masks()[kind]
    exact = results(definition, given(kv_heads), mask, 0.3)
    for compute in (lambda *x: ops.sink_attention(*x)[0], attend_to_sink_token):
        for found, wanted in zip(results(compute, given(kv_heads), *how, 0.3), exact, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_results_are_near_the_exact_ones(dtype: torch.dtype) -> None:
    mask, how = masks()["causal"]
    tensors = given(2, dtype)
    exact = results(definition, tuple(x.double() for x in tensors), mask, 0.3)  # type: ignore[arg-type]
    found = results(lambda *x: ops.sink_attention(*x)[0], tensors, *how, 0.3)
    for ours, wanted in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - wanted).abs().max() < 16 * torch.finfo(dtype).eps * wanted.abs().max()


def test_a_large_sink_takes_all_attention_and_a_small_one_none() -> None:
    q, k, v, _ = given(4)
    everything = definition(q, k, v, torch.full((HEADS,), -math.inf, dtype=q.dtype), masks()["causal"][0], 0.3)
    none, all_of_it = (ops.sink_attention(q, k, v, q.new_full((HEADS,), z), None, True, 0.3)[0] for z in (-1e4, 1e4))
    torch.testing.assert_close(none, everything)
    assert all_of_it.abs().max() == 0


def test_an_empty_batch_has_gradients() -> None:
    found = results(lambda *x: ops.sink_attention(*x)[0], given(2, batch=0), None, True, 0.3)
    assert [x.shape[0] for x in found] == [0, 0, 0, 0, HEADS]
    assert (found[-1] == 0).all()


def test_operands_that_do_not_fit_are_refused() -> None:
    q, k, v, sinks = given(2)
    three_k, three_v = (x[:, :, :1].expand(-1, -1, 3, -1) for x in (k, v))
    for wrong, message in (
        ((q, k[:, :5], v[:, :5], sinks, None, True, 1.0), "k and v must be"),
        ((q, three_k, three_v, sinks, None, True, 1.0), "3 kv heads"),
        ((q, k, v, sinks[:2], None, True, 1.0), "sinks must be"),
        ((q, k, v, sinks, None, True, 0.0), "scale must be positive"),
        ((q, k, v, sinks, torch.zeros(1, 1, SEQUENCE, SEQUENCE), False, 1.0), "mask must be boolean"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.sink_attention(*wrong)
