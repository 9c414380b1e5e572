"""`rope` and `gated` against their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from moec.runtime import ops
from moec.runtime.backends.torch import torch_rope
from moec.runtime.ops.elementwise import GATED

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)
ROPE = torch.ops.moec.rope_backward.default


def naive_rope(x: Tensor, theta: float) -> Tensor:
    """Position s turns the pair (i, i + h/2) by s · theta^(-2i/h)."""
    out = torch.empty_like(x)
    half = x.shape[3] // 2
    for s in range(x.shape[1]):
        for i in range(half):
            angle = s * theta ** (-2 * i / x.shape[3])
            a, b = x[:, s, :, i], x[:, s, :, i + half]
            out[:, s, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, s, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def naive_swiglu(x: Tensor) -> Tensor:
    gate, up = x.unbind(-2)
    return gate / (1 + torch.exp(-gate)) * up


def naive_geglu(x: Tensor) -> Tensor:
    gate, up = x.unbind(-2)
    return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up


NAIVE = {"swiglu": naive_swiglu, "geglu": naive_geglu}
every_gated = pytest.mark.parametrize("activation", GATED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_turns_each_half_split_pair_by_position_times_frequency(dtype: torch.dtype) -> None:
    x = torch.randn(2, 7, 3, 8, dtype=dtype)
    torch.testing.assert_close(
        ops.rope(x, None, 100.0).double(), naive_rope(x.double(), 100.0), rtol=0, atol=4 * TOLERANCE[dtype]
    )


def test_rope_agrees_with_hugging_face_llama_and_shares_its_tables_bit_for_bit() -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64)
    x = torch.randn(2, 33, 4, 16)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(33)[None])
    ours = torch_rope.rope_tables(33, 16, 10_000.0, torch.float32, torch.device("cpu"))
    assert torch.equal(ours[0][:, 0], cos[0, :, :8])
    assert torch.equal(ours[1][:, 0], sin[0, :, :8])
    theirs, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    torch.testing.assert_close(ops.rope(x, None, 10_000.0), theirs.transpose(1, 2), rtol=0, atol=1e-6)


HOW = {
    "some dims": (100.0, 1, 4),
    "neighbours": (100.0, 0, 0, True),
    "frequencies and a factor": (100.0, 0, 6, True, [0.5, 0.25, 3.0], 1.5),
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_rope_turns_some_dims_and_neighbours_as_complex_numbers(how: tuple[Any, ...]) -> None:
    theta, start, width, interleaved, frequencies, factor = (*how, *(None, 0, 0, False, (), 1.0)[len(how) :])
    width = width or 8
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64)
    expected = x.clone()
    for pair in range(width // 2):
        dims = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
        first, second = (start + dim for dim in dims)
        frequency = frequencies[pair] if frequencies else theta ** (-2 * pair / width)
        angle = torch.arange(7, dtype=torch.float64)[:, None] * frequency
        turned = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.full_like(angle, factor), angle)
        expected[..., first], expected[..., second] = turned.real, turned.imag
    torch.testing.assert_close(ops.rope(x, None, *how), expected, rtol=1e-12, atol=1e-12)
    assert gradcheck(lambda x: ops.rope(x, None, *how), (x[:, :3].clone().requires_grad_(),))
    positions = torch.tensor([[0, 1, 0, 1, 2, 0, 1]]).expand(2, 7)
    torch.testing.assert_close(ops.rope(x, positions, *how)[:, 2:5], ops.rope(x[:, 2:5].contiguous(), None, *how))


def test_rope_refuses_dims_outside_of_the_head_and_lists_of_another_length() -> None:
    x = torch.randn(1, 2, 1, 6)
    with pytest.raises(RuntimeError, match="4 dims from 4 must be in a head dim of 6"):
        ops.rope(x, None, 1e4, 4, 4)
    with pytest.raises(RuntimeError, match="there must be 3 frequencies or none, not 2"):
        ops.rope(x, None, 1e4, 0, 0, False, [1.0, 0.5])


def test_rope_is_undone_by_its_backward() -> None:
    x = torch.randn(2, 9, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(ROPE(ops.rope(x, None, 1e4), None, 1e4), x)


@pytest.mark.parametrize("shape", [(2, 3, 2, 4), (1, 1, 1, 2), (0, 3, 2, 4), (2, 0, 2, 4)])
def test_rope_gradients(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    if x.numel():
        assert gradcheck(lambda x: ops.rope(x, None, 1e4), (x,))
    else:
        ops.rope(x, None, 1e4).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape


def test_rope_takes_inputs_that_are_not_contiguous() -> None:
    x = torch.randn(2, 3, 5, 8).transpose(1, 2)
    assert torch.equal(ops.rope(x, None, 1e4), ops.rope(x.contiguous(), None, 1e4))


def test_rope_tables_made_under_inference_mode_serve_training_after() -> None:
    torch_rope.rope_tables.cache_clear()
    with torch.inference_mode():
        ops.rope(torch.randn(1, 6, 1, 4), None, 123.0)
    x = torch.randn(1, 6, 1, 4, requires_grad=True)
    ops.rope(x, None, 123.0).sum().backward()
    assert x.grad is not None


def test_rope_table_cache_is_bounded() -> None:
    for length in range(1, 40):
        ops.rope(torch.randn(1, length, 1, 4), None, 1e4)
    assert torch_rope.rope_tables.cache_info().currsize <= 16


def test_rope_refuses_an_odd_head_dim() -> None:
    with pytest.raises(RuntimeError, match="dims that turn must be even, not 5"):
        ops.rope(torch.randn(1, 2, 1, 5), None, 1e4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 2, 8), (2, 3, 2, 5), (2, 1), (0, 2, 4), (700, 2, 300)], ids=str)
@every_gated
def test_gated_activations_and_their_gradients_agree_with_the_definition(
    activation: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    out, expected = ops.gated(x, activation), NAIVE[activation](exact)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    assert x.grad is not None
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(x.grad.double(), exact.grad, **tolerance)


@every_gated
def test_gated_activations_round_bfloat16_twice_at_most(activation: str) -> None:
    x = torch.randn(64, 2, 32, dtype=torch.bfloat16)
    exact = ops.gated(x.double(), activation)
    assert bool(((ops.gated(x, activation) - exact).abs() <= 2.02 * 2**-8 * exact.abs()).all())


@every_gated
def test_gradients_of_gated_activations(activation: str) -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    strided = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True).mT[..., :2, :]
    assert gradcheck(ops.gated, (x, activation))
    assert gradcheck(ops.gated, (strided, activation))


@every_gated
def test_gated_activations_refuse_a_shape_without_two_halves(activation: str) -> None:
    with pytest.raises(RuntimeError, match=r"moec::gated: x must be \[\.\.\., 2, F\], not \[4, 3, 8\]"):
        ops.gated(torch.randn(4, 3, 8), activation)


def test_gated_refuses_an_activation_without_a_gate() -> None:
    with pytest.raises(RuntimeError, match="moec::gated: activation must be one of swiglu, geglu, not 'relu'"):
        ops.gated(torch.randn(4, 2, 8), "relu")
