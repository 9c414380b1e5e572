"""`masked_attention` against its definition, and the two ways to compute it against each other."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from moec.runtime import ops
from moec.runtime.ops.masked_attention import Mask, attend_by_sdpa

masked_attention = sys.modules[Mask.__module__]
"""The module: its operator has the same name."""
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


def masks() -> dict[str, tuple[Tensor, tuple[object, ...]]]:
    """What is visible, and how the operator is told: segments, real, causal, window."""
    all_of_them = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    band = all_of_them.tril() & ~all_of_them.tril(-3)
    texts = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
    real = torch.tensor([[1] * 11, [0] * 5 + [1] * 6])
    short = torch.tensor([[0] * 2 + [3] * 5 + [9] * 4, [-1] * 9 + [2] * 2])
    grid = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0]])
    of_texts, of_kinds, of_short, of_grid = (
        x[:, None, :, None] == x[:, None, None] for x in (texts, real, short, grid)
    )
    return {
        "causal": (all_of_them.tril(), (None, None, True, 0)),
        "all": (all_of_them, (None, None, False, 0)),
        "window": (band, (None, None, True, 3)),
        "window both ways": (band | band.mT, (None, None, False, 3)),
        "window of all": (all_of_them.tril(), (None, None, True, SEQUENCE)),
        "texts": (of_texts & all_of_them.tril(), (texts, None, True, 0)),
        "texts, window": (of_texts & band, (texts, None, True, 3)),
        "short texts": (of_short & all_of_them.tril(), (short, None, True, 0)),
        "short texts both ways": (of_short, (short, None, False, 0)),
        "windows of a grid": (of_grid, (grid, None, False, 0)),
        "one text each": (all_of_them.tril(), (torch.tensor([[0] * 11, [5] * 11]), None, True, 0)),
        "texts and padding": (of_texts & of_kinds, (texts, real, False, 0)),
    }


def test_a_block_has_the_keys_of_its_texts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_attention, "ROWS", 4)
    segments = torch.tensor([[0] * 2 + [3] * 6 + [9] * 3, [-1] * 2 + [2] * 7 + [4] * 2])
    rows = [slice(0, 4), slice(4, 8), slice(8, 11)]
    causal, both = (list(Mask.of_batch(segments, None, causal, 0).blocks(11)) for causal in (True, False))
    assert causal == list(zip(rows, [slice(0, 4), slice(2, 8), slice(2, 11)], strict=True))
    assert both == list(zip(rows, [slice(0, 9), slice(2, 9), slice(2, 11)], strict=True))
    windows = list(Mask.of_batch(segments, None, True, 2).blocks(11))
    assert windows == list(zip(rows, [slice(0, 4), slice(3, 8), slice(7, 11)], strict=True))


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *how: object) -> Tensor:
    attended: Tensor = ops.masked_attention(q, k, v, sinks, *how)[0]
    return attended


def in_public(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *how: object) -> Tensor:
    *mask, scale = how
    return attend_by_sdpa(q, k, v, sinks, Mask(*mask), scale)  # type: ignore[arg-type]


def results(compute: object, given: tuple[Tensor, ...], *how: object) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = compute(*leaves, *how)  # type: ignore[operator]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return [out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


@pytest.fixture(params=[256, 4], ids=["one block", "blocks of 4 rows"])
def _rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_attention, "ROWS", request.param)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("compute", [attend, in_public], ids=["operator", "public"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind", masks())
def test_weights_are_a_softmax_over_scores_and_the_sink(kind: str, kv_heads: int, compute: object) -> None:
    mask, how = masks()[kind]
    exact = results(definition, given(kv_heads), mask, 0.3)
    for found, wanted in zip(results(compute, given(kv_heads), *how, 0.3), exact, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("compute", [attend, in_public], ids=["operator", "public"])
@pytest.mark.parametrize("kind", masks())
def test_without_sinks_it_is_attention(kind: str, compute: object) -> None:
    mask, how = masks()[kind]
    q, k, v, _ = given(2)
    nothing = torch.full((HEADS,), -math.inf, dtype=q.dtype)
    exact = results(lambda *x: definition(*x, nothing, mask, 0.3), (q, k, v))
    found = results(lambda *x: compute(*x, None, *how, 0.3), (q, k, v))  # type: ignore[operator]
    for ours, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_results_are_near_the_exact_ones(dtype: torch.dtype) -> None:
    mask, how = masks()["window"]
    tensors = given(2, dtype)
    exact = results(definition, tuple(x.double() for x in tensors), mask, 0.3)
    for ours, wanted in zip(results(attend, tensors, *how, 0.3), exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - wanted).abs().max() < 16 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("compute", [attend, in_public], ids=["operator", "public"])
def test_sinks_of_fp32_beside_bf16_are_not_rounded(compute: object) -> None:
    """With no scores of keys and values of 1, a result is `1 − exp(z) / (1 + exp(z))`, in steps of bf16 near 0."""
    rows = torch.zeros(1, 1, HEADS, 8, dtype=torch.bfloat16)
    sinks = torch.linspace(8.0, 8.01, HEADS)
    found, *gradients = results(compute, (rows, rows, torch.ones_like(rows), sinks), None, None, True, 1, 0.3)
    torch.testing.assert_close(found[0, 0, :, 0].float(), torch.sigmoid(-sinks), rtol=2**-8, atol=0)
    assert len(found[0, 0, :, 0].unique()) > 1
    assert gradients[-1].dtype == torch.float32


def test_a_large_sink_takes_all_attention_and_a_small_one_none() -> None:
    q, k, v, _ = given(4)
    everything = definition(q, k, v, torch.full((HEADS,), -math.inf, dtype=q.dtype), masks()["causal"][0], 0.3)
    none, all_of_it = (attend(q, k, v, q.new_full((HEADS,), z), *masks()["causal"][1], 0.3) for z in (-1e4, 1e4))
    torch.testing.assert_close(none, everything)
    assert all_of_it.abs().max() == 0


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_an_empty_batch_has_gradients(kind: str) -> None:
    found = results(attend, given(2, batch=0), *masks()[kind][1], 0.3)
    assert [x.shape[0] for x in found] == [0, 0, 0, 0, HEADS]
    assert (found[-1] == 0).all()


def test_operands_that_do_not_fit_are_refused() -> None:
    q, k, v, sinks = given(2)
    three_k, three_v = (x[:, :, :1].expand(-1, -1, 3, -1) for x in (k, v))
    how = None, None, True, 0, 1.0
    for wrong, message in (
        ((q, k[:, :5], v[:, :5], sinks, *how), "k and v must be"),
        ((q, three_k, three_v, sinks, *how), "3 kv heads"),
        ((q, k, v, sinks[:2], *how), "sinks must be"),
        ((q, k, v, sinks, *how[:-1], 0.0), "scale must be positive"),
        ((q, k, v, sinks, None, None, True, -1, 1.0), "window must not be negative"),
        ((q, k, v, sinks, torch.zeros(1, SEQUENCE), None, True, 0, 1.0), "segments and real must be int64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            attend(*wrong)  # type: ignore[arg-type]
