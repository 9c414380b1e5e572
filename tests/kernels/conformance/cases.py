"""The table of cases: what every backend must compute as the definition does.

A case takes a backend and `Numbers` and gives results; what it draws depends on neither. Forward and backward belong
to one case, for what lies between them is a backend's own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from places import Numbers
from torch import Tensor

from moec.passes.ir.activations import ACTIVATIONS
from moec.runtime.backends import Backend

Case = Callable[[Backend, Numbers], Sequence[Tensor]]

# ---- route -------------------------------------------------------------------------------------------

HOW = list(itertools.product(("softmax", "sigmoid"), ("before", "after"), (False, True)))
ROUTES = [(1, 1), (8, 8), (13, 3), (256, 8)]


def route(backend: Backend, numbers: Numbers, how: tuple[str, str, bool]) -> list[Tensor]:
    results = []
    for (experts, k), tokens in itertools.product(ROUTES, (1, 65)):
        logits = numbers.logits(tokens, experts)
        probabilities, weights, chosen = backend.route(logits, None, k, *how)
        results += [probabilities, weights, chosen]
        of_all, of_chosen = numbers.of_router(*probabilities.shape), numbers.of_router(*weights.shape)
        for gradients in ((of_all, of_chosen), (of_all, None), (None, of_chosen)):
            results.append(backend.route_backward(logits, *gradients, weights, chosen, *how))
    return results


def route_nothing(backend: Backend, numbers: Numbers) -> list[Tensor]:
    logits = numbers.of_router(2, 0, 5)
    probabilities, weights, chosen = backend.route(logits, None, 2, "softmax", "before", True)
    grad = backend.route_backward(logits, None, weights, weights, chosen, "softmax", "before", True)
    return [probabilities, weights, chosen, grad]


def route_with(backend: Backend, numbers: Numbers, how: tuple[str, str, bool], options: Sequence[Any]) -> list[Tensor]:
    """With `options`: the scale, groups, kept groups, and the score of groups."""
    logits = numbers.logits(65, 24)
    probabilities, weights, chosen = backend.route(logits, None, 3, *how, *options)
    gradients = numbers.of_router(*probabilities.shape), numbers.of_router(*weights.shape)
    grad = backend.route_backward(logits, *gradients, weights, chosen, *how, *options[:1])
    return [probabilities, weights, chosen, grad]


GROUPS = {"top2_sum": (1.0, 4, 2, "top2_sum"), "max": (2.5, 8, 3, "max"), "top2_sum of one": (1.0, 24, 5, "top2_sum")}


def equal_groups(backend: Backend, numbers: Numbers, score: str) -> list[Tensor]:
    """Ties of groups, also of scores of -inf, and scores far below 0."""
    logits = torch.randint(-2, 3, (2, 40, 12), generator=numbers.draw).double() - 3
    logits[0, 0] = -torch.inf
    logits[0, 0, 7:9] = torch.tensor([-1.0, 0.0])
    logits[0, 1] = 0.0
    given = logits.to(numbers.device, numbers.router_dtype)
    _, _, chosen = backend.route(given, None, 5, "softmax", "after", True, 1.0, 4, 2, score)
    assert chosen[0, 1].tolist() == [0, 1, 2, 3, 4]
    assert chosen[0, 0].tolist() == [8, 7, 0, 1, 2]
    return [chosen]


def biased_route(backend: Backend, numbers: Numbers, how: tuple[str, str, bool]) -> list[Tensor]:
    """SingleProcessHome, far below 0, and with groups and a scale (DeepSeek-V3's whole gate)."""
    results = []
    for experts, level, options in ((13, 0, ()), (24, 0, GROUPS["max"]), (24, -1e3, GROUPS["top2_sum"])):
        logits = numbers.logits(65, experts)
        bias = numbers.of_router(experts) / 13 if level == 0 else numbers.logits(1, experts).flatten() * 64 + level
        probabilities, weights, chosen = backend.route(logits, bias, 3, *how, *options)
        gradients = numbers.of_router(*probabilities.shape), numbers.of_router(*weights.shape)
        grad = backend.route_backward(logits, *gradients, weights, chosen, *how, *options[:1])
        results += [probabilities, weights, chosen, grad]
    return results


def equal_scores(backend: Backend, numbers: Numbers, how: tuple[str, str, bool]) -> list[Tensor]:
    """Ties, also among -inf."""
    logits = torch.randint(-2, 3, (2, 40, 12), generator=numbers.draw).double()
    logits[0, 0] = -torch.inf
    logits[0, 0, 5] = 0.0
    logits[0, 1] = 0.0
    _, _, chosen = backend.route(logits.to(numbers.device, numbers.router_dtype), None, 5, *how)
    assert chosen[0, 1].tolist() == [0, 1, 2, 3, 4]
    return [chosen]


# ---- permute, combine --------------------------------------------------------------------------------

# batch, tokens, experts, k, dim
ROWS = {
    "uneven": (2, 33, 6, 2, 5),
    "many experts": (1, 12, 200, 8, 3),
    "k is all": (1, 9, 4, 4, 16),
    "one token": (1, 1, 8, 2, 7),
    "no tokens": (1, 0, 8, 2, 7),
    "no sequences": (0, 5, 8, 2, 7),
    "one expert": (1, 12, 1, 1, 2),
    "more than one block": (1, 70, 64, 2, 1),
    "wide": (1, 2, 3, 2, 2100),
}


def rows(
    backend: Backend, numbers: Numbers, shape: tuple[int, ...], skew: float = 0.0, padding: float | None = None
) -> list[Tensor]:
    """With `padding`, about that fraction of the tokens has choices of −1."""
    batch, tokens, experts, k, dim = shape
    x, choices = numbers.normal(batch, tokens, dim), numbers.choices(batch, tokens, experts, k, skew)
    some_are_none = padding is not None
    permuted, counts, positions = backend.permute(x, without(numbers, choices, padding), experts, some_are_none)
    back = backend.permute_backward(numbers.normal(*permuted.shape), positions)
    given, weights = numbers.normal(*permuted.shape), numbers.of_router(*positions.shape)
    combined = backend.combine(given, positions, weights)
    grads = backend.combine_backward(numbers.normal(*x.shape), given, positions, weights)
    summed = backend.sum_rows(given, positions, counts)
    spread = backend.sum_rows_backward(numbers.normal(*x.shape), positions, counts, given.shape[:1])
    return [permuted, counts, positions, back, combined, *grads, summed, spread]


def without(numbers: Numbers, choices: Tensor, padding: float | None) -> Tensor:
    """choices [B, S, k], −1 for those of a part of the tokens."""
    if padding is None:
        return choices
    drawn = torch.rand(choices.shape[:2], generator=numbers.draw) < padding
    return choices.masked_fill(drawn[..., None].to(choices.device), -1)


def one_expert_takes_all(backend: Backend, numbers: Numbers) -> list[Tensor]:
    """In the order of the tokens."""
    x, experts = numbers.normal(1, 300, 4), numbers.whole(torch.full((1, 300, 1), 3))
    permuted, counts, positions = backend.permute(x, experts, 6)
    assert torch.equal(permuted, x[0])
    assert counts.tolist() == [[0, 0, 0, 300, 0, 0]]
    assert positions.flatten().tolist() == list(range(300))
    return [permuted, counts, positions]


def random_loads() -> Iterator[tuple[str, Case]]:
    draw = random.Random(0)
    for number in range(8):
        experts = draw.randint(1, 40)
        shape = (1, draw.randint(1, 60), experts, draw.randint(1, min(experts, 6)), draw.randint(1, 40))
        yield f"rows, random {number}", partial(rows, shape=shape, skew=draw.choice([0.0, 1.0, 5.0]))


# ---- expert_mlp --------------------------------------------------------------------------------------

# Rows that each source sends for each expert.
COUNTS = {
    "uneven": [[3, 1, 4]],
    "more than one tile": [[70, 0, 33, 65]],
    "all to one": [[0, 130, 0, 0]],
    "one row": [[0, 1]],
    "no rows": [[0, 0, 0]],
    "one expert": [[5]],
    "four sources": [[3, 1, 2], [0, 2, 0], [0, 0, 0], [1, 70, 1]],
    "two sources, no rows": [[0, 0], [0, 0]],
    "two sources, an expert that neither uses": [[2, 0, 1], [1, 0, 2]],
}
# dim, hidden: below a tile, multiples of it, and slightly above it.
WIDTHS = [(6, 5), (64, 32), (70, 40)]


def new_biases(numbers: Numbers, up: Tensor, down: Tensor, bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """One number for each output; with `bias` false, none."""
    return (numbers.normal(*up.shape[:3]), numbers.normal(*down.shape[:2])) if bias else (None, None)


def experts(
    backend: Backend,
    numbers: Numbers,
    counts: list[list[int]],
    widths: tuple[int, int],
    activation: str,
    bias: bool = False,
    weighted: bool = False,
    parameters: Sequence[float | None] = (),
) -> list[Tensor]:
    """Random numbers of unit variance throughout."""
    of_experts = numbers.whole(torch.tensor(counts))
    num_experts, parts = of_experts.shape[1], ACTIVATIONS[activation].parts
    dim, hidden = widths
    given = numbers.normal(int(of_experts.sum()), dim)
    up = numbers.normal(num_experts, parts, hidden, dim, scale=dim**-0.5)
    down = numbers.normal(num_experts, dim, hidden, scale=hidden**-0.5)
    biases = new_biases(numbers, up, down, bias)
    weights = numbers.of_router(given.shape[0]) if weighted else None
    out, *saved = backend.expert_mlp(given, of_experts, up, down, *biases, weights, activation, *parameters)
    bounds = (*parameters, None, None)[:2]
    grad, rest = numbers.normal(*out.shape), (of_experts, up, down, *biases, weights, activation, *bounds, None)
    *of_inputs, of_weights = backend.expert_mlp_backward_split(grad, given, *saved, *rest)
    return [out, *backend.expert_mlp_backward(grad, given, *saved, *rest), *of_inputs, *of_weights()]


def linear(backend: Backend, numbers: Numbers, counts: list[list[int]], bias: bool = True) -> list[Tensor]:
    """One matrix for each expert, forward and backward."""
    of_experts = numbers.whole(torch.tensor(counts))
    rows, weight = numbers.normal(int(of_experts.sum()), 20), numbers.normal(of_experts.shape[1], 9, 20, scale=0.2)
    given = rows, of_experts, weight
    out = backend.expert_linear(*given, numbers.normal(*weight.shape[:2]) if bias else None)
    grad = numbers.normal(*out.shape)
    grad_rows, gradients = backend.expert_linear_backward_split(grad, *given, bias)
    return [out, *backend.expert_linear_backward(grad, *given, bias), grad_rows, *gradients()]


def random_experts() -> Iterator[tuple[str, Case]]:
    draw = random.Random(0)
    for number in range(6):
        num_experts, sources, most = draw.randint(1, 9), draw.choice([1, 1, 3]), draw.choice([1, 5, 90])
        counts = [[draw.randint(0, most) for _ in range(num_experts)] for _ in range(sources)]
        widths, activation = (draw.randint(1, 80), draw.randint(1, 80)), draw.choice(list(ACTIVATIONS))
        case = partial(experts, counts=counts, widths=widths, activation=activation, bias=number % 2 == 1)
        yield f"experts, random {number}", case


# ---- mixture_mlp -------------------------------------------------------------------------------------


def mixture(
    backend: Backend,
    numbers: Numbers,
    shape: tuple[int, int, int, int],
    widths: tuple[int, int] = (70, 40),
    activation: str = "swiglu",
    dropped: float = 0.0,
    skew: float = 0.0,
    bias: bool = False,
    parameters: Sequence[float | None] = (),
) -> list[Tensor]:
    """Forward and backward, with some choices dropped."""
    (batch, tokens, num_experts, k), (dim, hidden) = shape, widths
    x, choices = numbers.normal(batch, tokens, dim), numbers.choices(batch, tokens, num_experts, k, skew)
    lost = torch.rand(choices.shape, generator=numbers.draw) < dropped
    choices = choices.masked_fill(lost.to(choices.device), -1)
    weights = numbers.of_router(*choices.shape)
    up = numbers.normal(num_experts, ACTIVATIONS[activation].parts, hidden, dim, scale=dim**-0.5)
    down = numbers.normal(num_experts, dim, hidden, scale=hidden**-0.5)
    biases = new_biases(numbers, up, down, bias)
    of_experts = up, down, *biases, activation, *(*parameters, None, None)[:2], None
    mixed, counts, saved, positions, table = backend.mixture_mlp(x, choices, weights, *of_experts)
    grad = numbers.normal(*mixed.shape)
    given = (grad, x, saved, counts, positions, table, weights, *of_experts)
    *of_inputs, of_weights = backend.mixture_mlp_backward_split(*given)
    return [mixed, counts, positions, *backend.mixture_mlp_backward(*given), *of_inputs, *of_weights()]


# batch, tokens, experts, k
MIXTURES = {
    "uneven": (2, 33, 6, 2),
    "many experts": (1, 9, 40, 8),
    "k is all": (1, 9, 4, 4),
    "one token": (1, 1, 8, 2),
    "no tokens": (1, 0, 8, 2),
    "no sequences": (0, 5, 8, 2),
    "one expert": (1, 130, 1, 1),
}


# ---- the rest ----------------------------------------------------------------------------------------


PARAMETERS_OF = {"clamp and alpha": (0.7, 1.702), "clamp": (0.7,), "alpha": (None, 1.702)}
"""Of `swiglu`. The clamp lies inside of the drawn numbers."""


def gated(backend: Backend, numbers: Numbers, activation: str, parameters: Sequence[float | None] = ()) -> list[Tensor]:
    results = []
    for shape in ((2, 3, 2, 5), (1, 1, 2, 1100), (0, 4, 2, 8), (7, 2, 64)):
        x = numbers.normal(*shape, scale=3.0)
        results.append(backend.gated(x, activation, *parameters))
        grad = numbers.normal(*results[-1].shape)
        results.append(backend.gated_backward(grad, x, activation, *parameters))
    return results


def rope(backend: Backend, numbers: Numbers) -> list[Tensor]:
    x = numbers.normal(2, 7, 3, 8)
    results = []
    for how in ((1e4,), (1e4, 2, 4, True), (1e4, 0, 6, False, [1.0, 0.5, 0.25], 1.25)):
        results += [backend.rope(x, None, *how), backend.rope_backward(numbers.normal(*x.shape), None, *how)]
    return results


def balance(backend: Backend, numbers: Numbers, padding: float | None = None) -> list[Tensor]:
    choices = without(numbers, numbers.choices(4, 9, 6, 2), padding)
    results = [backend.count_choices(choices, 6, groups) for groups in (0, 2)]
    probabilities = numbers.logits(36, 6).softmax(-1).view(4, 9, 6)
    for counts in list(results):
        results.append(backend.switch_loss(probabilities, counts))
        results.append(backend.switch_loss_backward(results[-1].new_tensor(2.0), probabilities, counts))
    return results


def padded(
    backend: Backend, numbers: Numbers, groups: int, least: int, tokens: int = 9, padding: float | None = None
) -> list[Tensor]:
    """A capacity of 1.25; with `least`, room for all."""
    num_experts, dim, how = 6, 5, (groups, 1, 5, 4)
    x, choices = numbers.normal(4, tokens, dim), numbers.choices(4, tokens, num_experts, 2, skew=1.0)
    choices = without(numbers, choices, padding)
    queues = backend.count_queues(choices, num_experts)
    starts = backend.queue_starts(queues, groups)
    kept = backend.keep_choices(choices, starts, *how, 1)
    largest = backend.largest_load(kept, num_experts)
    first = backend.keep_first(choices, numbers.of_router(4, tokens), num_experts, *how, 1)
    best = [backend.keep_best(choices, by, num_experts, *how, 1) for by in (None, numbers.of_router(*choices.shape))]
    logits, bias = numbers.of_router(4, tokens, num_experts), numbers.of_router(num_experts)
    others = backend.reroute(logits, choices, None, bias, "sigmoid", *how, 1)
    taken = backend.choose_tokens(logits, None, 5, 4, groups)
    results = [queues, starts, kept, largest, first, *best, *others, taken]
    results += [backend.balanced_assignment(logits, torch.tensor(training), None, groups) for training in (0, 1)]
    for given, counts, positions in (
        backend.permute_padded(x, choices, starts, *how, least),
        backend.permute_dynamic(x, kept, largest, num_experts),
    ):
        back = backend.permute_padded_backward(numbers.normal(*given.shape), positions)
        filled, weights = numbers.normal(*given.shape), numbers.of_router(*positions.shape)
        combined = backend.combine_padded(filled, positions, weights)
        grads = backend.combine_padded_backward(numbers.normal(*x.shape), filled, positions, weights)
        summed = backend.sum_rows(filled, positions, counts)
        spread = backend.sum_rows_backward(numbers.normal(*x.shape), positions, counts, filled.shape[:2])
        results += [given, counts, positions, back, combined, *grads, summed, spread]
    return results


OF_ROUTER: dict[str, Case] = {
    **{f"route {' '.join(map(str, how))}": partial(route, how=how) for how in HOW},
    **{f"equal scores {' '.join(map(str, how))}": partial(equal_scores, how=how) for how in HOW},
    **{f"biased route {' '.join(map(str, how))}": partial(biased_route, how=how) for how in HOW},
    **{f"scaled route {' '.join(map(str, how))}": partial(route_with, how=how, options=(2.446,)) for how in HOW},
    **{
        f"grouped route {' '.join(map(str, how))}, {name}": partial(route_with, how=how, options=options)
        for how in HOW
        for name, options in GROUPS.items()
    },
    **{f"equal groups, {score}": partial(equal_groups, score=score) for score in ("top2_sum", "max")},
    "route, no tokens": route_nothing,
    "balance": balance,
    "balance, padding": partial(balance, padding=0.5),
    "balance, padding alone": partial(balance, padding=1.0),
    # The gradient jumps at a clamp: in 16 bits, rounding alone moves numbers across it.
    **{
        f"experts with {name}": partial(
            experts, counts=COUNTS["uneven"], widths=(20, 9), activation="swiglu", bias=True, parameters=given
        )
        for name, given in PARAMETERS_OF.items()
        if name != "alpha"
    },
    **{
        f"mixture with {name}": partial(mixture, shape=(2, 20, 5, 2), dropped=0.3, bias=True, parameters=given)
        for name, given in PARAMETERS_OF.items()
        if name != "alpha"
    },
}
"""Only in float32 and float64."""

CASES: dict[str, Case] = {
    **{f"rows, {name}": partial(rows, shape=shape) for name, shape in ROWS.items()},
    **{
        f"rows, {name}, {padding} padding": partial(rows, shape=shape, padding=padding)
        for name, shape in ROWS.items()
        for padding in (0.0, 0.5, 1.0)
    },
    "rows, one expert takes all": one_expert_takes_all,
    **dict(random_loads()),
    **{
        f"experts, {name}": partial(experts, counts=counts, widths=(70, 40), activation="swiglu")
        for name, counts in COUNTS.items()
    },
    **{
        f"experts, {activation} {widths} {len(counts)}": partial(
            experts, counts=counts, widths=widths, activation=activation
        )
        for activation, widths in itertools.product(ACTIVATIONS, WIDTHS)
        for counts in ([[3, 1, 40]], [[3, 1], [2, 5]])
    },
    **{
        f"experts with biases, {name}": partial(experts, counts=counts, widths=(20, 9), activation="swiglu", bias=True)
        for name, counts in COUNTS.items()
    },
    **{
        f"experts with biases, {activation} {widths}": partial(
            experts, counts=[[3, 1], [2, 45]], widths=widths, activation=activation, bias=True
        )
        for activation, widths in itertools.product(("swiglu", "gelu"), WIDTHS)
    },
    **{
        f"experts with weights, {name}": partial(
            experts, counts=counts, widths=(20, 9), activation="swiglu", weighted=True
        )
        for name, counts in COUNTS.items()
    },
    **{
        f"experts with weights, {activation} {widths} {len(counts)}": partial(
            experts, counts=counts, widths=widths, activation=activation, bias=activation != "relu", weighted=True
        )
        for activation, widths in itertools.product(ACTIVATIONS, WIDTHS)
        for counts in ([[3, 1, 40]], [[3, 1], [2, 45]])
    },
    # More than one tile of columns either way.
    "experts with weights, wide": partial(
        experts, counts=[[30, 1], [2, 45]], widths=(70, 140), activation="swiglu", bias=True, weighted=True
    ),
    **dict(random_experts()),
    **{f"mixture, {name}": partial(mixture, shape=shape, widths=(20, 9)) for name, shape in MIXTURES.items()},
    **{
        f"mixture, {activation} {widths}": partial(
            mixture, shape=(2, 20, 5, 2), widths=widths, activation=activation, dropped=0.3, skew=1.0
        )
        for activation, widths in itertools.product(ACTIVATIONS, WIDTHS)
    },
    **{
        f"mixture with biases, {name}": partial(mixture, shape=shape, widths=(20, 9), bias=True)
        for name, shape in MIXTURES.items()
    },
    **{
        f"mixture with biases, {activation} {widths}": partial(
            mixture, shape=(2, 20, 5, 2), widths=widths, activation=activation, dropped=0.3, skew=1.0, bias=True
        )
        for activation, widths in itertools.product(("swiglu", "gelu"), WIDTHS)
    },
    # More than one tile of columns either way.
    "mixture with biases, wide": partial(mixture, shape=(1, 20, 3, 2), widths=(70, 140), bias=True),
    "mixture with biases, all dropped": partial(mixture, shape=(1, 9, 4, 2), dropped=1.0, bias=True),
    "mixture, one expert takes nearly all": partial(mixture, shape=(1, 140, 6, 1), skew=20.0),
    "mixture, all dropped": partial(mixture, shape=(1, 9, 4, 2), dropped=1.0),
    **{word: partial(gated, activation=word) for word, kind in ACTIVATIONS.items() if kind.gated},
    **{
        f"swiglu with {name}": partial(gated, activation="swiglu", parameters=given)
        for name, given in PARAMETERS_OF.items()
    },
    "experts with alpha": partial(
        experts, counts=COUNTS["uneven"], widths=(20, 9), activation="swiglu", parameters=(None, 1.702)
    ),
    "mixture with alpha": partial(mixture, shape=(2, 20, 5, 2), dropped=0.3, parameters=(None, 1.702)),
    **{f"linear experts, {name}": partial(linear, counts=counts) for name, counts in COUNTS.items()},
    "linear experts, no bias": partial(linear, counts=COUNTS["four sources"], bias=False),
    "rope": rope,
    "padded, sequences": partial(padded, groups=0, least=1),
    "padded, groups": partial(padded, groups=2, least=1),
    "padded, room for all": partial(padded, groups=1, least=99),
    **{
        f"padded, {padding} padding, {groups} groups": partial(padded, groups=groups, least=1, padding=padding)
        for padding in (0.5, 1.0)
        for groups in (0, 2)
    },
    "padded, no tokens": partial(padded, groups=0, least=1, tokens=0),
}
"""In every dtype."""
