"""`torch.library.opcheck` of every operator that needs no process group, through every backend present.

Its schema is true, its fake gives what it gives, its autograd rule is registered as compilers want it, and
`make_fx` with symbolic shapes computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import ACTIVATIONS, COUNTS, HOW, new_biases
from places import INTERPRETED, Numbers, Place
from support.combinations import some
from support.conversion_cases import CASES
from torch import Tensor
from torch.library import opcheck

from moec.runtime import ops
from moec.runtime.backends.torch import torch_backend
from moec.runtime.ops.elementwise import GATED

# What is checked depends on the number of parts alone: the other activations are for the slow part.
OF_EXPERTS = list({ACTIVATIONS[name].parts: name for name in (*ACTIVATIONS, "swiglu")}.values())
OTHERS = [name for name in ACTIVATIONS if name not in OF_EXPERTS]

Call = tuple[str, tuple[Any, ...]]
"""An operator's name and arguments."""


def leaf(x: Tensor | None) -> Tensor | None:
    """A copy that requires a gradient."""
    return None if x is None else x.clone().requires_grad_()


def route(numbers: Numbers) -> Iterator[Call]:
    logits = numbers.logits(6, 6).view(2, 3, 6)
    yield "route", (logits.clone().requires_grad_(), None, 2, *HOW[0], 2.5, 3, 2, "max")
    for how in HOW:
        for bias in (None, numbers.of_router(logits.shape[-1])):
            yield "route", (logits.clone().requires_grad_(), bias, 2, *how)
        probabilities, weights, experts = ops.route(logits, None, 2, *how)
        for grads in ((probabilities, weights), (None, weights), (probabilities, None)):
            yield "route_backward", (logits, *grads, weights, experts, *how)
    yield "note_scores", (logits.clone().requires_grad_(),)


def balance(numbers: Numbers) -> Iterator[Call]:
    probabilities, experts = numbers.logits(24, 4).softmax(-1).view(4, 6, 4), numbers.choices(4, 6, 4, 2)
    for groups in (0, 2):
        yield "count_choices", (experts, 4, groups)
        choices = ops.count_choices(experts, 4, groups)
        yield "switch_loss", (probabilities.clone().requires_grad_(), choices)
        yield "switch_loss_backward", (probabilities.new_tensor(2.0), probabilities, choices)


def rows(numbers: Numbers) -> Iterator[Call]:
    experts, x = numbers.choices(2, 3, 5, 2), numbers.normal(2, 3, 4)
    permuted, _, positions = ops.permute(x, experts, 5)
    weights = numbers.of_router(2, 3, 2)
    yield "permute", (x.clone().requires_grad_(), experts, 5)
    yield "permute_backward", (permuted, positions)
    yield "combine", (permuted.clone().requires_grad_(), positions, weights.clone().requires_grad_())
    yield "combine_backward", (x, permuted, positions, weights)
    yield from weighted(x, permuted, positions, weights, experts.new_zeros(1, 5))
    # Choices of padding are −1; as many rows as there are others.
    padded = experts.index_fill(1, experts.new_tensor([1]), -1)
    fewer, counts, positions = ops.permute(x, padded, 5, some_are_none=True)
    yield "permute", (x.clone().requires_grad_(), padded, 5, True)
    yield "permute_backward", (fewer, positions)
    yield "combine", (fewer.clone().requires_grad_(), positions, weights.clone().requires_grad_())
    yield "combine_backward", (x, fewer, positions, weights)
    yield from weighted(x, fewer, positions, weights, counts)


def weighted(x: Tensor, rows: Tensor, positions: Tensor, weights: Tensor, counts: Tensor) -> Iterator[Call]:
    """Of rows [R, D], or of rows in places [E, N, D]."""
    yield "permute_weights", (leaf(weights), positions, rows)
    yield "permute_weights_backward", (ops.permute_weights(weights, positions, rows), positions)
    yield "sum_rows", (leaf(rows), positions, counts)
    yield "sum_rows_backward", (x, positions, counts, list(rows.shape[:-1]))


def experts(numbers: Numbers, activations: Sequence[str] = OF_EXPERTS) -> Iterator[Call]:
    for activation in activations:
        for name in ("uneven", "four sources", "no rows") if activation == "swiglu" else ("four sources",):
            counts = numbers.whole(torch.tensor(COUNTS[name]))
            parts, num_experts = ACTIVATIONS[activation].parts, counts.shape[1]
            given = numbers.normal(int(counts.sum()), 4)
            up, down = numbers.normal(num_experts, parts, 3, 4), numbers.normal(num_experts, 4, 3)
            for bias in (False, True) if (activation, name) == ("swiglu", "four sources") else (False,):
                of_experts = up, down, *new_biases(numbers, up, down, bias)
                yield "expert_mlp", (leaf(given), counts, *map(leaf, of_experts), None, activation)
                out, *saved = ops.expert_mlp(given, counts, *of_experts, None, activation)
                yield "expert_mlp_backward", (out, given, *saved, counts, *of_experts, None, activation)
                weights = numbers.of_router(given.shape[0])
                yield "expert_mlp", (leaf(given), counts, *map(leaf, of_experts), leaf(weights), activation)
                yield "expert_mlp_backward", (out, given, *saved, counts, *of_experts, weights, activation)


def recomputed(numbers: Numbers) -> Iterator[Call]:
    counts, choices = numbers.whole(torch.tensor(COUNTS["four sources"])), numbers.choices(2, 3, 5, 2)
    choices[0, 1] = -1
    rows, num_experts = int(counts.sum()), counts.shape[1]
    up, down = numbers.normal(num_experts, 2, 3, 4), numbers.normal(num_experts, 4, 3)
    of_experts = [*map(leaf, (up, down, *new_biases(numbers, up, down, True)))]
    given, weights = leaf(numbers.normal(rows, 4)), leaf(numbers.of_router(rows))
    yield "expert_mlp_recomputed", (given, counts, *of_experts, weights, "swiglu")
    up, down = leaf(numbers.normal(5, 1, 3, 4)), leaf(numbers.normal(5, 4, 3))
    given, weights = leaf(numbers.normal(2, 3, 4)), leaf(numbers.of_router(2, 3, 2))
    yield "mixture_mlp_recomputed", (given, choices, weights, up, down, None, None, "gelu")


def linear(numbers: Numbers) -> Iterator[Call]:
    for name in ("uneven", "four sources", "no rows"):
        counts = numbers.whole(torch.tensor(COUNTS[name]))
        rows, experts = int(counts.sum()), counts.shape[1]
        given, weight = numbers.normal(rows, 4), numbers.normal(experts, 3, 4)
        for bias in (None, leaf(numbers.normal(experts, 3))):
            yield "expert_linear", (leaf(given), counts, leaf(weight), bias)
            yield "expert_linear_backward", (numbers.normal(rows, 3), given, counts, weight, bias is not None)


def with_parameters(numbers: Numbers) -> Iterator[Call]:
    """`swiglu` with a clamp and an alpha: the arguments of autograd that have defaults."""
    counts, choices = numbers.whole(torch.tensor(COUNTS["uneven"])), numbers.choices(2, 3, 3, 2)
    up, down = leaf(numbers.normal(3, 2, 3, 4)), leaf(numbers.normal(3, 4, 3))
    given, x, weights = leaf(numbers.normal(8, 4)), leaf(numbers.normal(2, 3, 4)), leaf(numbers.of_router(2, 3, 2))
    for parameters in ((0.5,), (0.5, 1.702), (None, 1.702)):
        yield "gated", (leaf(numbers.normal(2, 2, 4)), "swiglu", *parameters)
    for parameters in ((0.5,), (0.5, 1.702)):
        yield "expert_mlp", (given, counts, up, down, None, None, None, "swiglu", *parameters)
        yield "mixture_mlp", (x, choices, weights, up, down, None, None, "swiglu", *parameters)
    yield "expert_mlp_recomputed", (given, counts, up, down, None, None, None, "swiglu", *parameters)
    yield "mixture_mlp_recomputed", (x, choices, weights, up, down, None, None, "swiglu", *parameters)


def mixture(numbers: Numbers, activations: Sequence[str] = OF_EXPERTS) -> Iterator[Call]:
    for activation in activations:
        for dropped in (False, True) if activation == "swiglu" else (True,):
            choices, x = numbers.choices(2, 3, 5, 2), numbers.normal(2, 3, 4)
            if dropped:
                choices[0, 1], choices[1, 0, 1] = -1, -1
            weights, parts = numbers.of_router(2, 3, 2), ACTIVATIONS[activation].parts
            up, down = numbers.normal(5, parts, 3, 4), numbers.normal(5, 4, 3)
            for bias in (False, True) if not dropped else (False,):
                matrices = weights, up, down, *new_biases(numbers, up, down, bias)
                yield "mixture_mlp", (leaf(x), choices, *map(leaf, matrices), activation)
                mixed, counts, hidden, *saved = ops.mixture_mlp(x, choices, *matrices, activation)
                yield "mixture_mlp_backward", (mixed, x, hidden, counts, *saved, *matrices, activation)


def other_experts(numbers: Numbers) -> Iterator[Call]:
    yield from experts(numbers, OTHERS)
    yield from mixture(numbers, OTHERS)


def elementwise(numbers: Numbers) -> Iterator[Call]:
    x = numbers.normal(2, 3, 2, 4)
    positions = numbers.whole(torch.tensor([[0, 1, 2], [0, 0, 1]]))
    for given in (None, positions):
        yield "rope", (x.clone().requires_grad_(), given, 1e4)
        yield "rope_backward", (x, given, 1e4)
    yield "rope", (x.clone().requires_grad_(), None, 1e4, 2, 2, True, [0.5], 1.5)
    for activation in GATED:
        yield "gated", (x.clone().requires_grad_(), activation)
        yield "gated_backward", (x[..., 0, :], x, activation)


def attention(numbers: Numbers) -> Iterator[Call]:
    q, (k, v), sinks = numbers.normal(2, 3, 4, 8), (numbers.normal(2, 3, 2, 8) for _ in range(2)), numbers.normal(4)
    texts = numbers.whole(torch.tensor([[0, 0, 1], [0, 0, 0]]))
    for beside, how in (((sinks, None, None), (True, 0, 0.5)), ((None, texts, None), (False, 2, 0.5))):
        yield "masked_attention", (*map(leaf, (q, k, v, beside[0])), *beside[1:], *how)
        results = ops.masked_attention(q, k, v, *beside, *how)
        yield "masked_attention_backward", (q, q, k, v, *beside, *results, *how)


def random_numbers(numbers: Numbers) -> Iterator[Call]:
    ids, zero, one = numbers.choices(2, 3, 6, 1)[..., 0], torch.tensor(0), torch.tensor(1)
    sequences = numbers.whole(torch.tensor([4, 5]))
    yield "token_keys", (ids, sequences, one, zero)
    keys = ops.token_keys(ids, sequences, one, zero)
    for training in (zero, one):
        yield "jitter", (leaf(numbers.normal(2, 3, 5)), keys, training, one, 0.5, 0)
        yield "normal_noise", (leaf(numbers.of_router(2, 3, 5)), keys, training, one, 1)


def embedding(numbers: Numbers) -> Iterator[Call]:
    ids = numbers.choices(2, 3, 6, 1)[..., 0]
    yield "embed", (ids, leaf(numbers.normal(6, 4)))
    yield "embed_backward", (numbers.normal(2, 3, 4), ids, 6)


def norm(numbers: Numbers) -> Iterator[Call]:
    x, weight, bias = numbers.normal(2, 3, 4), numbers.normal(4), numbers.normal(4)
    yield "layer_norm", (leaf(x), leaf(weight), leaf(bias), 1e-5)
    yield "layer_norm", (leaf(x), leaf(weight), None, 1e-5)
    yield "layer_norm_backward", (x, x, weight, 1e-5)


def padded(numbers: Numbers) -> Iterator[Call]:
    x, choices = numbers.normal(4, 5, 2), numbers.choices(4, 5, 6, 2, skew=1.0)
    yield "count_queues", (choices, 6)
    queues = ops.count_queues(choices, 6)
    for groups in (2,) if INTERPRETED else (0, 2):
        yield "queue_starts", (queues, groups)
        starts, how = ops.queue_starts(queues, groups), (None, 5, 4, 5, 4, 1, groups, 1)
        yield "keep_choices", (choices, starts, *how)
        yield "permute_padded", (x.clone().requires_grad_(), choices, starts, *how)
        varying = (torch.tensor(0), 5, 4, 3, 4, 1, groups, 1)
        yield "keep_choices", (choices, starts, *varying)
        yield "permute_padded", (x.clone().requires_grad_(), choices, starts, *varying)
        for training in (None, torch.tensor(0)):
            yield "keep_first", (choices, numbers.of_router(4, 5), training, 5, 4, 3, 4, 1, 6, groups)
            for priorities in (None, numbers.of_router(4, 5, 2)):
                yield "keep_best", (choices, priorities, training, 5, 4, 3, 4, 1, 6, groups)
            logits, how_in_order = numbers.of_router(4, 5, 6), (training, 5, 4, 3, 4, 1, "softmax", groups)
            yield "reroute", (logits, choices, numbers.of_router(4, 5), numbers.of_router(6), *how_in_order)
            yield "reroute", (logits, choices, None, None, *how_in_order)
        for real in (None, numbers.choices(4, 5, 2, 1)[..., 0]):
            yield "choose_tokens", (logits, real, 3, 2, groups)
            yield "balanced_assignment", (logits, torch.tensor(1), real, groups)
        kept = ops.keep_choices(choices, starts, *how)
        yield "largest_load", (kept, 6)
        yield "permute_dynamic", (x.clone().requires_grad_(), kept, ops.largest_load(kept, 6), 6)
        given, counts, positions = ops.permute_padded(x, choices, starts, *how)
        weights = numbers.of_router(4, 5, 2)
        yield "even_counts", (given,)
        yield "permute_padded_backward", (given, positions)
        yield "combine_padded", (given.clone().requires_grad_(), positions, weights.clone().requires_grad_())
        yield "combine_padded_backward", (x, given, positions, weights)
        yield from weighted(x, given, positions, weights, counts)


def generation(numbers: Numbers) -> Iterator[Call]:
    """Without gradients: `cached_attention` also writes to its caches."""
    q, k, v = numbers.normal(2, 3, 4, 4), numbers.normal(2, 3, 2, 4), numbers.normal(2, 3, 2, 4)
    for begin, places in ((0, [[0, 1, 2], [0, 1, 2]]), (2, [[2, 3, 4], [2, 3, 4]]), (-1, [[1, 2, 3], [4, 5, 6]])):
        end, where = max(map(max, places)) + 1, numbers.whole(torch.tensor(places))
        caches = numbers.normal(2, 2, 8, 4), numbers.normal(2, 2, 8, 4)
        for starts, sinks, window in ((None, None, 0), (where - where % 2, numbers.normal(4), 2)):
            yield "cached_attention", (q, k, v, *caches, where, starts, sinks, begin, end, window, 0.5)
    cos, sin = numbers.of_router(1, 3, 1, 2), numbers.of_router(1, 3, 1, 2)
    for interleaved in (False, True):
        yield "turn", (q, cos, sin, 0, interleaved)
    choices, weights = numbers.choices(2, 1, 5, 2), numbers.of_router(2, 1, 2)
    up, down = numbers.normal(5, 2, 3, 4), numbers.normal(5, 4, 3)
    yield "mixture_of_few", (numbers.normal(2, 1, 4), choices, weights, up, down, None, None, "swiglu")


TABLE = {
    family.__name__: family
    for family in (
        route,
        balance,
        rows,
        experts,
        recomputed,
        linear,
        with_parameters,
        mixture,
        other_experts,
        elementwise,
        attention,
        random_numbers,
        embedding,
        norm,
        padded,
        generation,
    )
}
IN_A_GROUP = {
    *(case.operator for case in CASES),
    *("embed_part", "embed_part_backward", "label_logit", "label_logit_backward"),
    "exchange_and_gather_counts",
    "assign_slots",
}
"""`tests/distributed` checks these."""


@pytest.fixture(autouse=True)
def the_same_where_nothing_is_written() -> Iterator[None]:
    """Tables of rows are longer than what is written to them: on a device their ends differ from call to call."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
WHICH = ["first of each kind", *(pytest.param(which, marks=pytest.mark.slow) for which in ("first", "last"))]
FAST = [family for family in TABLE if family != "other_experts" and not INTERPRETED]


def kind(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What opcheck looks at: which arguments are tensors, of what kind, and which are left out; no numbers."""
    return name, *(
        (x.dtype, x.dim(), x.numel() == 0, x.requires_grad) if isinstance(x, Tensor) else type(x) for x in arguments
    )


@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("family", some(list(TABLE), FAST))
def test_operators_are_well_formed(place: Place, family: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first dtype or the last; in the slow interpreter always in the first."""
    monkeypatch.setenv("MOEC_BACKEND", "torch" if place.backend is torch_backend else "triton")
    dtype = place.dtypes[-1 if which == "last" and not INTERPRETED else 0]
    seen = set[Any]()
    for name, arguments in TABLE[family](Numbers(dtype, place.device)):
        if which == "first of each kind" and kind(name, arguments) in seen:
            continue
        seen.add(kind(name, arguments))
        # No case for `aot_dispatch`: a gradient that there is none of, for it wants tensors alone; and numbers that
        # nobody writes, of dropped choices' pre-activations, and of blocks beyond the last in a kernel's table.
        dropped = name == "mixture_mlp" and bool((arguments[1] < 0).any())
        of_blocks = place.backend is not torch_backend and name in ("expert_mlp", "mixture_mlp")
        without = name == "route_backward" and None in arguments
        utilities = UTILITIES[:3] if without or dropped or of_blocks else UTILITIES
        found = opcheck(getattr(torch.ops.moec, name).default, arguments, test_utils=utilities)
        assert set(found.values()) == {"SUCCESS"}, name


def test_every_operator_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    import moec.runtime.ops  # noqa: F401 - registers all there are

    monkeypatch.setenv("MOEC_BACKEND", "torch")
    checked = {name for family in TABLE.values() for name, _ in family(Numbers(torch.float64))}
    schemas = torch._C._jit_get_all_schemas()
    registered = {schema.name.removeprefix("moec::") for schema in schemas if schema.name.startswith("moec::")}
    assert checked | IN_A_GROUP == registered
    assert not checked & IN_A_GROUP
