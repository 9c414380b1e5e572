"""Normal noise of logits: its definition in Python's integers, its distribution, and the keys of tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moec.runtime import ops
from moec.runtime.backends.torch import torch_random


def keys_of(batch: int, sequence: int, step: int = 0, seed: int = 0) -> Tensor:
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return ops.token_keys(ids, torch.arange(batch), torch.tensor(seed), torch.tensor(step))


def drawn(logits: Tensor, training: int = 1, step: int = 0, seed: int = 0, layer: int = 0, stream: int = 0) -> Tensor:
    keys = keys_of(*logits.shape[:2], step, seed)
    return ops.normal_noise(logits, keys, torch.tensor(training), torch.tensor(layer), stream)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 (Salmon et al. 2011, figure 2 and table 2)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second % 2**32, (first >> 32) ^ c3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def by_hand(key: int, count: int, layer: int, stream: int) -> list[float]:
    numbers: list[float] = []
    for i in range(-(-count // 4)):
        u = [((word >> 8) + 1) / 2**24 for word in philox((i, layer, stream, 0), (key % 2**32, (key >> 32) % 2**32))]
        for first, second in ((u[0], u[1]), (u[2], u[3])):
            radius, angle = math.sqrt(-2 * math.log(first)), 2 * math.pi * second
            numbers += [radius * math.cos(angle), radius * math.sin(angle)]
    return numbers[:count]


def test_numbers_are_those_of_box_and_muller() -> None:
    found = drawn(torch.zeros(2, 3, 7, dtype=torch.float64), step=5, seed=9, layer=3, stream=1)
    keys = keys_of(2, 3, step=5, seed=9)
    expected = [[by_hand(int(key), 7, 3, 1) for key in row] for row in keys]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_numbers_are_standard_normal_and_independent() -> None:
    numbers = drawn(torch.zeros(8, 256, 64, dtype=torch.float64))
    assert abs(numbers.mean()) < 9e-3  # 131,072 numbers: three standard deviations are 8.3e-3
    assert abs(numbers.var() - 1) < 0.012
    assert abs((numbers**4).mean() - 3) < 0.09
    flat = numbers.flatten(0, 1)
    for dim in (0, 1):
        first, second = flat.narrow(dim, 0, flat.shape[dim] - 1), flat.narrow(dim, 1, flat.shape[dim] - 1)
        assert abs((first * second).mean()) < 9e-3


def test_evaluation_draws_zeros() -> None:
    assert not drawn(torch.ones(2, 3, 5), training=0).any()
    assert drawn(torch.ones(2, 3, 5)).all()


@pytest.mark.parametrize("other", [{"step": 1}, {"seed": 1}, {"layer": 1}, {"stream": 1}])
def test_another_step_seed_layer_or_op_draws_other_noise(other: dict[str, int]) -> None:
    x = torch.zeros(2, 16, 64)
    assert (drawn(x) == drawn(x, **other)).float().mean() < 0.01


def test_some_of_the_tokens_draw_what_all_draw() -> None:
    logits, keys = torch.zeros(4, 8, 10), keys_of(4, 8)
    one, zero = torch.tensor(1), torch.tensor(0)
    whole = ops.normal_noise(logits, keys, one, zero, 0)
    assert torch.equal(ops.normal_noise(logits[1:3, 4:], keys[1:3, 4:], one, zero, 0), whole[1:3, 4:])


def test_the_values_of_the_logits_do_not_matter_and_get_no_gradient() -> None:
    logits = torch.full((2, 3, 5), torch.nan, requires_grad=True)
    noise = drawn(logits)
    assert not noise.requires_grad
    assert torch.equal(noise, drawn(torch.zeros(2, 3, 5)))


def test_noise_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(3, 7, 6)
    whole = drawn(logits)
    monkeypatch.setattr(torch_random, "CHUNK", 13)
    assert torch.equal(drawn(logits), whole)
    assert torch.allclose(drawn(logits.double()), whole.double(), atol=1e-5)


def test_no_tokens_draw_nothing() -> None:
    assert drawn(torch.ones(0, 4, 8)).shape == (0, 4, 8)
    assert drawn(torch.ones(2, 0, 8)).shape == (2, 0, 8)


def test_wrong_arguments_are_refused() -> None:
    one, zero = torch.tensor(1), torch.tensor(0)
    with pytest.raises(RuntimeError, match="must be float32 or float64"):
        ops.normal_noise(torch.ones(2, 3, 4).bfloat16(), keys_of(2, 3), one, zero, 0)
    with pytest.raises(RuntimeError, match="keys must be int64"):
        ops.normal_noise(torch.ones(2, 3, 4), keys_of(2, 4), one, zero, 0)
