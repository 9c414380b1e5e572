"""Sums over tokens in bf16: no gradient has a larger error than rounding its result explains."""

from __future__ import annotations

import pytest
import torch
from support.plans import moe_spec
from torch import Tensor, fx

from moec.codegen.emit import emit_graph, info_of
from moec.passes.ir import Program
from moec.passes.ir.interface import FORWARD
from moec.passes.lower.lower_model import lower
from moec.runtime import ops
from moec.runtime.ops.embed import embed
from moec.runtime.verify.cluster.shuffles import NODES

TOKENS, DIM, VOCAB = 4096, 16, 32
ONE_ROUNDING = 2**-8
"""The largest relative error of one number rounded to bf16."""


def ids() -> Tensor:
    """Half of all tokens have one id."""
    drawn = torch.randint(VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))
    drawn[:, ::2] = 3
    return drawn


def gradient(*shape: int) -> Tensor:
    """Mostly of one sign: a sum in bf16 would stop growing."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 1).bfloat16()


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def summed_by_id(size: int, first: int = 0) -> Tensor:
    """The gradient of rows `first … first + size` of a table in float64."""
    flat, grad = ids().flatten(), gradient(*ids().shape, DIM).double().flatten(0, 1)
    return torch.zeros(VOCAB, DIM, dtype=torch.float64).index_add_(0, flat, grad)[first : first + size]


def test_the_embedding_of_a_frequent_id_keeps_its_gradient():
    table = torch.randn(VOCAB, DIM).bfloat16().requires_grad_()
    embed(ids(), table).backward(gradient(*ids().shape, DIM))
    assert error(table.grad, summed_by_id(VOCAB)) < ONE_ROUNDING


def test_so_does_the_embedding_of_a_sharded_vocabulary():
    tables = [part.clone().requires_grad_() for part in torch.randn(VOCAB, DIM).bfloat16().chunk(2)]
    found = NODES["moec.embed_part.default"]((), [[ids(), ids()], tables])
    torch.autograd.backward(found, [gradient(*ids().shape, DIM)] * 2)
    for rank, table in enumerate(tables):
        assert error(table.grad, summed_by_id(VOCAB // 2, rank * VOCAB // 2)) < ONE_ROUNDING


def test_an_id_out_of_range_is_an_index_error():
    with pytest.raises(IndexError):
        ops.embed(torch.tensor([[VOCAB]]), torch.zeros(VOCAB, DIM))


@pytest.mark.parametrize("kind", ["layer_norm(bias = true)", "layer_norm(bias = false)", "rms"])
def test_vectors_of_norms_keep_their_gradients(kind: str):
    program = lower(moe_spec(dtype="bf16", model=f"norm = {kind}"))
    x, expected = torch.randn(2, TOKENS // 2, DIM).bfloat16(), {}
    for dtype in (torch.float64, torch.bfloat16):
        y, vectors = last_norm(program, x.to(dtype))
        y.backward(gradient(*x.shape).to(dtype))
        gradients = {name: p.grad for name, p in vectors.items()}
        expected = expected or gradients
        assert gradients.keys() == expected.keys() == {"norm.weight", *(["norm.bias"] if "true" in kind else [])}
        for name, wanted in expected.items():
            assert error(gradients[name], wanted) < ONE_ROUNDING, name


def last_norm(program: Program, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The final norm of x, and its parameters, which are ones."""
    graph = emit_graph(program, program.block(FORWARD), float64=x.dtype == torch.float64)
    (norm,) = (op for op in program.block(FORWARD).ops if op.mnemonic.endswith("_norm"))
    vectors = {name[1:]: torch.ones(DIM, dtype=x.dtype, requires_grad=True) for name in norm.operands[1:]}
    values: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        info = info_of(node)
        if info.parameter in vectors:
            values[node] = vectors[info.parameter]
        elif info.op is norm:
            values[node] = node.target(*fx.map_arg(node.args, lambda used: values.get(used, x)))
            if info.value is not None:
                return values[node], vectors
    raise AssertionError("the model has no norm before its head")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_counts_of_choices_are_exact_integers_in_any_dtype(dtype: torch.dtype):
    """bf16 counts in steps of 32 from 4,096 on."""
    tokens = TOKENS + 13
    x, experts = torch.zeros(1, tokens, 4, dtype=dtype), torch.ones(1, tokens, 1, dtype=torch.int64)
    up, down = torch.zeros(3, 1, 2, 4, dtype=dtype), torch.zeros(3, 4, 2, dtype=dtype)
    starts = ops.queue_starts(ops.count_queues(experts, 3), 0)
    weights = torch.ones(experts.shape)
    for counts in (
        ops.permute(x, experts, 3)[1],
        ops.count_choices(experts, 3, 0),
        ops.permute_padded(x, experts, starts, None, 3, 1, 3, 1, 1, 0, 1)[1],
        ops.mixture_mlp(x, experts, weights, up, down, None, None, "gelu")[1],
    ):
        assert counts.dtype == torch.int64
        assert counts.tolist() == [[0, tokens, 0]]
