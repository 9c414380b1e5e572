"""`route` against a loop over tokens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from moec.runtime import ops

MODES = list(itertools.product(("softmax", "sigmoid"), ("before", "after"), (False, True)))
every_mode = pytest.mark.parametrize(("score", "order", "normalize"), MODES)


def naive_route(logits: Tensor, k: int, score: str, order: str, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    def scored(values: Tensor) -> Tensor:
        return values.softmax(-1) if score == "softmax" else values.sigmoid()

    scores = scored(logits)
    probabilities = scores / scores.sum(-1, keepdim=True)
    weights, experts = [], []
    for sequence in range(logits.shape[0]):
        for token in range(logits.shape[1]):
            keys = (logits if order == "after" else scores)[sequence, token]
            chosen = sorted(range(logits.shape[2]), key=lambda e, keys=keys: (-keys[e].item(), e))[:k]
            kept = scored(logits[sequence, token, chosen]) if order == "after" else scores[sequence, token, chosen]
            weights.append(kept / kept.sum() if normalize else kept)
            experts.append(torch.tensor(chosen))
    shape = (*logits.shape[:2], k)
    return probabilities, torch.stack(weights).view(shape), torch.stack(experts).view(shape)


@every_mode
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (6, 1), (5, 5), (1, 1), (64, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_route_and_its_gradient_agree_with_a_loop_over_tokens(
    num_experts: int, k: int, dtype: torch.dtype, score: str, order: str, normalize: bool
) -> None:
    logits = torch.randn(2, 5, num_experts, dtype=dtype, requires_grad=True)
    exact = logits.detach().double().requires_grad_()
    probabilities, weights, experts = ops.route(logits, None, k, score, order, normalize)
    expected = naive_route(exact, k, score, order, normalize)
    assert probabilities.dtype == weights.dtype == dtype
    assert torch.equal(experts, expected[2])
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(probabilities.double(), expected[0], **tolerance)
    torch.testing.assert_close(weights.double(), expected[1], **tolerance)

    grads = torch.randn_like(probabilities), torch.randn_like(weights)
    torch.autograd.backward((probabilities, weights), grads)
    torch.autograd.backward(expected[:2], [grad.double() for grad in grads])
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, **tolerance)


@every_mode
def test_route_gradients(score: str, order: str, normalize: bool) -> None:
    logits = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    for output in ((0,), (1,), (0, 1)):
        assert gradcheck(
            lambda x, output=output: [ops.route(x, None, 2, score, order, normalize)[i] for i in output], (logits,)
        )


@every_mode
def test_ties_go_to_the_lower_expert(score: str, order: str, normalize: bool) -> None:
    for num_experts, k in ((8, 3), (16, 2), (64, 8), (256, 8), (7, 7), (40, 40), (40, 17)):
        level = torch.zeros(1, 4, num_experts)
        assert torch.equal(ops.route(level, None, k, score, order, normalize)[2], torch.arange(k).expand(1, 4, k)), (
            f"{num_experts} equal logits"
        )
        few = torch.randint(0, 3, (2, 16, num_experts)).double()
        assert torch.equal(
            ops.route(few, None, k, score, order, normalize)[2], naive_route(few, k, score, order, normalize)[2]
        )


def test_weights_come_best_first_and_sum_to_one_when_normalized() -> None:
    logits = torch.randn(2, 50, 16)
    for score, order, normalize in MODES:
        weights = ops.route(logits, None, 4, score, order, normalize)[1]
        assert (weights.diff(dim=-1) <= 0).all()
        if normalize or (order == "after" and score == "softmax"):
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 50))


@every_mode
def test_experts_are_distinct_even_where_logits_are_minus_infinity(score: str, order: str, normalize: bool) -> None:
    logits = torch.full((1, 1, 6), -math.inf)
    logits[..., 3] = 0.5
    logits[..., 5] = 1.0
    assert ops.route(logits, None, 4, score, order, normalize)[2].tolist() == [[[5, 3, 0, 1]]]


def test_sigmoid_scores_that_underflow_still_normalize() -> None:
    logits = torch.full((1, 1, 4), -200.0, requires_grad=True)
    probabilities, weights, _ = ops.route(logits, None, 2, "sigmoid", "before", True)
    torch.testing.assert_close(probabilities, torch.full((1, 1, 4), 0.25))
    torch.testing.assert_close(weights, torch.full((1, 1, 2), 0.5))
    (probabilities[..., 0].sum() + weights[..., 0].sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_tokens_whose_sigmoids_underflow_do_not_change_others() -> None:
    logits = torch.randn(1, 5, 6, requires_grad=True)
    with torch.no_grad():
        logits[0, 2] = -200.0
    for normalize in (False, True):
        whole = ops.route(logits, None, 2, "sigmoid", "before", normalize)
        for token in (0, 2, 4):
            alone = ops.route(logits[:, [token]], None, 2, "sigmoid", "before", normalize)
            assert all(torch.equal(a[:, 0], b[:, token]) for a, b in zip(alone, whole, strict=True))
        grads = [torch.ones_like(whole[0]), torch.randn_like(whole[1])]
        (found,) = torch.autograd.grad(whole[:2], logits, grads)
        assert found.isfinite().all()


@every_mode
def test_logits_that_are_nan_are_refused_and_located(score: str, order: str, normalize: bool) -> None:
    logits = torch.randn(2, 3, 4)
    logits[1, 2, 3] = math.nan
    with pytest.raises(FloatingPointError, match=r"are NaN or infinite for 1 of 6 tokens, first token 2 of sequence 1"):
        ops.route(logits, None, 2, score, order, normalize)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_no_tokens_route_nowhere(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, requires_grad=True)
    assert ops.route(logits, None, 2, "softmax", "before", True, 1.0, 2, 1, "max")[2].shape == (*shape[:2], 2)
    probabilities, weights, experts = ops.route(logits, None, 2, "softmax", "before", True)
    assert weights.shape == experts.shape == (*shape[:2], 2)
    (probabilities.sum() + weights.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.shape == shape


def test_only_the_outputs_in_use_get_gradients() -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    _, _, experts = ops.route(logits, None, 2, "softmax", "before", True)
    assert not experts.requires_grad


def test_arguments_out_of_range_are_refused() -> None:
    logits = torch.randn(1, 2, 4)
    for k in (0, 5):
        with pytest.raises(RuntimeError, match=f"k must be between 1 and the 4 experts, not {k}"):
            ops.route(logits, None, k, "softmax", "before", True)
    with pytest.raises(RuntimeError, match="score must be one of softmax, sigmoid, not 'tanh'"):
        ops.route(logits, None, 1, "tanh", "before", True)
    with pytest.raises(RuntimeError, match=r"must be float32 or float64, not torch\.bfloat16"):
        ops.route(logits.bfloat16(), None, 1, "softmax", "before", True)


# ---- with biases -----------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (6, 1), (5, 5), (64, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_biases_choose_and_do_not_weigh(
    num_experts: int, k: int, dtype: torch.dtype, score: str, order: str, normalize: bool
) -> None:
    logits = torch.randn(2, 5, num_experts, dtype=dtype, requires_grad=True)
    bias = torch.randn(num_experts, dtype=dtype) / num_experts
    probabilities, weights, experts = ops.route(logits, bias, k, score, order, normalize)
    exact = logits.detach().double().requires_grad_()
    scores = exact.softmax(-1) if score == "softmax" else exact.sigmoid()
    for sequence, token in itertools.product(range(2), range(5)):
        keys = (scores[sequence, token] + bias).tolist()
        assert (
            experts[sequence, token].tolist() == sorted(range(num_experts), key=lambda e, keys=keys: (-keys[e], e))[:k]
        )
    kept = exact.gather(-1, experts)
    wanted = scores.gather(-1, experts)
    if order == "after":
        wanted = kept.softmax(-1) if score == "softmax" else kept.sigmoid()
    wanted = wanted / wanted.sum(-1, keepdim=True) if normalize else wanted
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(weights.double(), wanted, **tolerance)
    torch.testing.assert_close(probabilities.double(), scores / scores.sum(-1, keepdim=True), **tolerance)
    grads = torch.randn_like(probabilities), torch.randn_like(weights)
    torch.autograd.backward((probabilities, weights), grads)
    torch.autograd.backward((scores / scores.sum(-1, keepdim=True), wanted), [grad.double() for grad in grads])
    torch.testing.assert_close(logits.grad.double(), exact.grad, **tolerance)


def test_a_bias_far_above_all_scores_leaves_their_weight_as_it_is() -> None:
    """A weight computed as biased score minus bias would be 0."""
    logits, bias = torch.tensor([[[-1.0, 0.0, 1.0]]]), torch.tensor([1e9, 0.0, 0.0])
    _, weights, experts = ops.route(logits, bias, 1, "sigmoid", "before", False)
    assert experts.item() == 0
    assert weights.item() == pytest.approx(1 / (1 + math.e))


@every_mode
def test_biases_of_zeros_change_nothing(score: str, order: str, normalize: bool) -> None:
    logits = torch.randint(-2, 3, (2, 30, 12)).float()
    without = ops.route(logits, None, 4, score, order, normalize)
    biased = ops.route(logits, torch.zeros(12), 4, score, order, normalize)
    for one, other in zip(without, biased, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bias", [torch.zeros(7), torch.zeros(1, 8), torch.zeros(8, dtype=torch.bfloat16)], ids=str)
def test_a_bias_of_another_shape_or_dtype_is_refused(bias: Tensor) -> None:
    with pytest.raises((ValueError, RuntimeError), match="bias must be"):
        ops.route(torch.zeros(1, 2, 8), bias, 2, "softmax", "before", True)


# ---- with a scale ----------------------------------------------------------------------------------------


@every_mode
def test_the_scale_multiplies_weights_and_their_gradients_alone(score: str, order: str, normalize: bool) -> None:
    logits = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    plain, scaled = (ops.route(logits, None, 3, score, order, normalize, scale) for scale in (1.0, 2.5))
    torch.testing.assert_close(scaled[1], 2.5 * plain[1], rtol=1e-14, atol=0)
    assert torch.equal(scaled[0], plain[0])
    assert torch.equal(scaled[2], plain[2])
    of_all, of_chosen = torch.randn_like(plain[0]), torch.randn_like(plain[1])
    (expected,) = torch.autograd.grad((plain[0] * of_all).sum() + 2.5 * (plain[1] * of_chosen).sum(), logits)
    (found,) = torch.autograd.grad((scaled[0] * of_all).sum() + (scaled[1] * of_chosen).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert gradcheck(lambda x: ops.route(x, None, 3, score, order, normalize, 2.5)[1], (logits,))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_no_factor_is_refused(scale: float) -> None:
    with pytest.raises(RuntimeError, match="scale must be positive and finite"):
        ops.route(torch.zeros(1, 2, 8), None, 2, "softmax", "before", True, scale)


# ---- with groups -----------------------------------------------------------------------------------------


def within_groups(keys: list[float], k: int, groups: int, keep: int, group_score: str) -> list[int]:
    """The choice of one token, as DeepSeek-V3's section 2.1.2 says it; ties go to the lower index."""
    size = len(keys) // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    best = 2 if group_score == "top2_sum" else 1
    scores = [sum(sorted((keys[e] for e in group), reverse=True)[:best]) for group in members]
    kept = sorted(range(groups), key=lambda g: (-scores[g], g))[:keep]
    allowed = [e for g in kept for e in members[g]]
    return sorted(allowed, key=lambda e: (-keys[e], e))[:k]


SHAPES = [(12, 4, 2, 3), (16, 8, 3, 4), (6, 6, 3, 3), (8, 2, 1, 4), (64, 8, 4, 8), (9, 3, 3, 2)]
grouped = pytest.mark.parametrize(("num_experts", "groups", "keep", "k"), SHAPES)


@every_mode
@grouped
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_experts_outside_of_the_best_groups_are_not_chosen(
    num_experts: int, groups: int, keep: int, k: int, group_score: str, score: str, order: str, normalize: bool
) -> None:
    logits = torch.randn(2, 6, num_experts, dtype=torch.float64)
    logits[0] = logits[0].round()  # ties
    for bias in (None, torch.randn(num_experts, dtype=torch.float64), torch.full((num_experts,), -1e6).double()):
        how = (score, order, normalize, 1.0, groups, keep, group_score)
        probabilities, weights, experts = ops.route(logits, bias, k, *how)
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        keys = logits if order == "after" and bias is None else scores if bias is None else scores + bias
        for sequence, token in itertools.product(range(2), range(6)):
            expected = within_groups(keys[sequence, token].tolist(), k, groups, keep, group_score)
            assert experts[sequence, token].tolist() == expected
        kept = (logits if order == "after" else scores).gather(-1, experts)
        if order == "after":
            kept = kept.softmax(-1) if score == "softmax" else kept.sigmoid()
        wanted = kept / kept.sum(-1, keepdim=True) if normalize else kept
        torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-13)
        assert torch.equal(probabilities, ops.route(logits, None, k, score, order, normalize)[0])


def test_strongly_negative_biases_do_not_bring_masked_experts_back() -> None:
    """DeepSeek-V3's first copies masked the other groups with 0, which is above every biased score here."""
    logits = torch.randn(1, 200, 16)
    experts = ops.route(logits, torch.full((16,), -5.0), 4, "sigmoid", "before", True, 2.5, 4, 2, "top2_sum")[2]
    assert torch.equal(experts, ops.route(logits, None, 4, "sigmoid", "before", True, 2.5, 4, 2, "top2_sum")[2])
    assert max(len(set((token // 4).tolist())) for token in experts[0]) == 2


@grouped
def test_equal_groups_are_kept_in_the_order_of_their_numbers(num_experts: int, groups: int, keep: int, k: int) -> None:
    for group_score in ("top2_sum", "max"):
        how = ("softmax", "after", True, 1.0, groups, keep, group_score)
        assert torch.equal(ops.route(torch.zeros(1, 3, num_experts), None, k, *how)[2], torch.arange(k).expand(1, 3, k))
        level = torch.full((1, 3, num_experts), -math.inf)
        level[..., -1] = 0.5
        experts = ops.route(level, None, 1, "sigmoid", "before", False, 1.0, groups, keep, "max")[2]
        assert (experts == num_experts - 1).all()


def test_gradients_with_groups_are_those_of_the_choice() -> None:
    logits = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64)
    for score, order, normalize in MODES:
        how = (score, order, normalize, 2.5, 4, 2, "top2_sum")
        assert gradcheck(lambda x, how=how: ops.route(x, bias, 2, *how)[:2], (logits,))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ((3, 1, "max"), "8 experts do not make 3 equal groups"),
        ((4, 5, "max"), "cannot choose 2 experts from 5 of 4 groups"),
        ((8, 1, "max"), "cannot choose 2 experts from 1 of 8 groups"),
        ((4, 2, "mean"), "group_score must be one of top2_sum, max, not 'mean'"),
        ((0, 1, "max"), "do not make 0 equal groups"),
    ],
)
def test_groups_that_do_not_fit_are_refused(how: tuple[int, int, str], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.route(torch.zeros(1, 2, 8), None, 2, "softmax", "before", True, 1.0, *how)
