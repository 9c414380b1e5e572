"""Invalid inputs of operators: an error, or plain torch and one warning; never a wrong number."""

from __future__ import annotations

import warnings
from math import inf, nan

import pytest
import torch
from cases import HOW
from places import INTERPRETED, Numbers, Place
from support.combinations import diagonals

from moec.passes.ir.activations import ACTIVATIONS
from moec.runtime.backends import Backend, BackendError
from moec.runtime.backends.torch import torch_backend
from moec.runtime.backends.triton.triton_launch import too_many

# Logits of one token, and whether softmax and sigmoid make numbers of them.
LOGITS = {
    "nan": ([0, 1, nan, 2, 3], False, False),
    "all nan": ([nan] * 5, False, False),
    "inf": ([0, 1, inf, 2, 3], False, True),
    "all inf": ([inf] * 5, False, True),
    "both infinities": ([inf, -inf, 0, 1, -inf], False, True),
    "-inf": ([0, 1, -inf, 2, 3], True, True),
    "one above -inf": ([-inf, -inf, 0.5, -inf, -inf], True, True),
    "all -inf": ([-inf] * 5, False, False),
    "the largest numbers": ([1e38, -3e38, 3e38, 0, 1], True, True),
}


@pytest.mark.parametrize(("logits", "how"), diagonals(list(LOGITS), HOW, number=2))
def test_logits_make_finite_weights_or_are_refused(place: Place, logits: str, how: tuple[str, str, bool]) -> None:
    token, by_softmax, by_sigmoid = LOGITS[logits]
    x = torch.tensor([[[0, 1, 2, 3, 4], token]], dtype=torch.float32, device=place.device)
    fine = by_softmax if how[0] == "softmax" else by_sigmoid
    if not fine and place.device == "cpu":
        with pytest.raises(FloatingPointError, match=r"NaN or infinite for 1 of 2 tokens, first token 1 of sequence 0"):
            place.backend.route(x, None, 2, *how)
        return
    probabilities, weights, experts = place.backend.route(x, None, 2, *how)
    assert sorted(experts[0, 0].tolist()) == [3, 4]
    first, second = experts[0, 1].tolist()
    assert 0 <= first < 5
    assert 0 <= second < 5
    assert first != second
    assert bool(probabilities[0, 0].isfinite().all() and weights[0, 0].isfinite().all())
    if not fine:  # kernels do not check this; the loss is NaN
        assert bool(probabilities[0, 1].isnan().any() or weights[0, 1].isnan().any())
        return
    grad = place.backend.route_backward(x, probabilities, weights, weights, experts, *how)
    assert bool(torch.cat([probabilities, weights, grad], -1).isfinite().all())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_at_nan_are_those_of_plain_torch(backend: Backend, device: str, activation: str) -> None:
    def gradients(backend: Backend, device: str) -> list[torch.Tensor]:
        numbers = Numbers(torch.float32, device)
        rows, parts = numbers.normal(3, 4), ACTIVATIONS[activation].parts
        up, down = numbers.normal(1, parts, 5, 4), numbers.normal(1, 4, 5)
        hidden = numbers.normal(3, parts, 5)
        hidden[1, 0, 2] = nan
        given = numbers.whole(torch.tensor([[3]])), up, down, None, None, None, activation
        *_, table = backend.expert_mlp(rows, *given)
        return [x.cpu() for x in backend.expert_mlp_backward(numbers.normal(3, 4), rows, hidden, table, *given)]

    found, expected = gradients(backend, device), gradients(torch_backend, "cpu")
    assert expected[2].isnan().any()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_more_experts_than_kernels_take_run_in_plain_torch_with_one_warning(backend: Backend, device: str) -> None:
    num_experts, numbers = 2049, Numbers(torch.float32, device)
    logits, x = numbers.logits(3, num_experts), numbers.normal(1, 3, 4)
    up, down = numbers.normal(num_experts, 2, 3, 4), numbers.normal(num_experts, 4, 3)

    def layer(with_backend: Backend) -> list[torch.Tensor]:
        probabilities, weights, chosen = with_backend.route(logits, None, 2, "softmax", "before", True)
        rows, counts, positions = with_backend.permute(x, chosen, num_experts)
        out, *saved = with_backend.expert_mlp(rows, counts, up, down, None, None, None, "swiglu")
        grads = with_backend.expert_mlp_backward(out, rows, *saved, counts, up, down, None, None, None, "swiglu")
        grad = with_backend.route_backward(logits, probabilities, None, weights, chosen, "softmax", "before", True)
        return [*grads, grad, with_backend.combine(out, positions, weights)]

    too_many.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = layer(backend)
    said = (
        []
        if backend is torch_backend
        else ["moec's kernels take at most 2048 experts; a layer of 2049 runs in plain torch"]
    )
    assert [str(warning.message) for warning in caught] == said
    for one, exact in zip(ours, layer(torch_backend), strict=True):
        torch.testing.assert_close(one, exact)


@pytest.mark.parametrize("wrong", [-1, 4, 5, 300, 2**40])
def test_an_expert_that_is_none_is_refused_or_leads_nowhere(
    place: Place, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, experts = torch.randn(1, 70, 3).to(place.device), torch.randint(4, (1, 70, 2)).to(place.device)
    experts[0, 40, 1] = wrong
    if place.device == "cpu" or place.backend is torch_backend:
        with pytest.raises(RuntimeError, match="experts must be from 0 to 3, not" if place.device == "cpu" else None):
            place.backend.permute(x, experts, 4)
    if place.backend is torch_backend:
        return
    # Kernels do not check this: the choice gets no row, and every other position is valid.
    monkeypatch.setattr("moec.runtime.backends.triton.triton_rows.refuse_out_of_range", lambda *_: None)
    rows, counts, positions = place.backend.permute(x, experts, 4)
    assert rows.shape == (140, 3)
    assert int(counts.sum()) == 139
    assert int(positions[0, 40, 1]) == -1
    assert sorted(positions.flatten().tolist()) == list(range(-1, 139))


@pytest.mark.parametrize("counts", [[[2, 4]], [[2, 2]], [[3, 1], [0, 2]]])
def test_counts_that_do_not_add_up_are_refused_or_lead_nowhere(place: Place, counts: list[list[int]]) -> None:
    numbers = Numbers(torch.float32, place.device)
    rows, up, down = numbers.normal(5, 4), numbers.normal(2, 1, 3, 4), numbers.normal(2, 4, 3)
    given = numbers.whole(torch.tensor(counts))
    if place.device == "cpu" or place.backend is torch_backend:
        total = sum(map(sum, counts))
        with pytest.raises(RuntimeError, match=f"the counts add up to {total}, but there are 5 rows"):
            place.backend.expert_mlp(rows, given, up, down, None, None, None, "gelu")
        return
    out, *_ = place.backend.expert_mlp(rows, given, up, down, None, None, None, "gelu")
    torch.cuda.synchronize()
    assert out.shape == rows.shape


def test_a_dtype_without_kernels_is_refused(place: Place) -> None:
    if place.backend is torch_backend:
        pytest.skip("plain torch takes what torch does")
    x = torch.randn(1, 2, 8).to(place.device, torch.float8_e4m3fn)
    with pytest.raises(BackendError, match=r"moec has no kernels for torch\.float8_e4m3fn"):
        place.backend.permute(x, torch.zeros(1, 2, 1, dtype=torch.int64, device=place.device), 2)


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")
def test_bf16_is_refused_in_the_interpreter_which_computes_it_wrongly(backend: Backend) -> None:
    x = torch.randn(1, 2, 8).bfloat16()
    with pytest.raises(BackendError, match="interpreter computes bf16 wrongly"):
        backend.permute(x, torch.zeros(1, 2, 1, dtype=torch.int64), 2)
