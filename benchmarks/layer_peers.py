"""One MoE layer, as moec and as others compute it: logits, the k best of a softmax, normalised, SwiGLU experts.

Each function takes a `Problem` and gives the layer, or raises `NotRun` with the reason. All train the weights, the
router's too; they share the memory that these are in, which nothing here writes to, so that all fit on one device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from layer_problem import Problem
from torch import Tensor, nn

from moec.codegen.kernels.tile_rule import tiles_for
from moec.codegen.kernels.tiles import KERNELS, Ways
from moec.runtime import ops
from moec.runtime.backends import forced_backend
from moec.runtime.backends.triton.libraries import library_grouped_mm
from moec.runtime.backends.triton.triton_launch import dtype_name
from moec.runtime.backends.triton.triton_tiles import family_of

GIGABYTE = 2**30


class NotRun(Exception):  # noqa: N818 - the reason why there is no figure, not an error
    """The implementation is not installed, or does not support this shape."""


@dataclass(frozen=True, slots=True)
class Layer:
    run: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]


def _needs(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotRun("not installed" if error.name == module.partition(".")[0] else f"import: {error}") from error


def _weights(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = (w.detach().requires_grad_() for w in (problem.gate, problem.up, problem.down))
    return gate, up, down


def _choose(x: Tensor, gate: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores, experts = F.linear(x, gate).softmax(-1, dtype=torch.float32).topk(k)
    return scores / scores.sum(-1, keepdim=True), experts


def moec(problem: Problem, ways: str | None = None) -> Layer:
    """Its products in the ways that moec chooses, or in these."""
    gate, up, down = _weights(problem)
    compute = _computed_by_moec(problem, ways)
    return Layer(lambda x: compute(x, gate, up, down), (gate, up, down))


def _computed_by_moec(problem: Problem, ways: str | None = None) -> Callable[..., Tensor]:
    by_parts = (problem.shape.experts, 2, problem.shape.hidden, problem.shape.dim)

    def compute(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        logits = F.linear(x, gate).float()[None]
        _, weights, chosen = ops.route(logits, None, problem.shape.k, "softmax", "before", True)
        given = (x[None], chosen, weights, up.view(by_parts), down, None, None, "swiglu", None, None)
        return ops.mixture_mlp(*given, ways)[0][0]

    return compute


def moec_in_a_graph(problem: Problem) -> Layer:
    """Forward and backward as CUDA graphs, as `layer.capture` makes them of a layer whose weights are fp32."""
    if not problem.x.is_cuda:
        raise NotRun("CUDA graphs need a CUDA device")
    weights = _weights(problem)
    sample = problem.x.clone().requires_grad_()
    run = torch.cuda.make_graphed_callables(_computed_by_moec(problem), (sample, *weights))
    return Layer(lambda x: run(x, *weights), weights)


def moec_by_kernels(problem: Problem) -> Layer:
    """All six products by moec's own kernels, in the rule's tiles."""
    shape = problem.shape
    how = (shape.tokens * shape.k, shape.experts, (shape.dim, shape.hidden), True, family_of(problem.x.device))
    return moec(problem, str(tiles_for(dtype_name(problem.x), *how)))


def moec_by_grouped_mm(problem: Problem) -> Layer:
    """All six products by `F.grouped_mm`, with moec's kernels around it."""
    shape, x = problem.shape, problem.x
    unfit = library_grouped_mm.complaint(
        x.device, dtype_name(x), shape.experts, (shape.dim, shape.hidden, 2 * shape.hidden)
    )
    if unfit or forced_backend() == "triton":
        raise NotRun(unfit or "MOEC_BACKEND forces moec's own kernels")
    return moec(problem, str(Ways(*("grouped_mm" for _ in KERNELS))))


def dense(problem: Problem) -> Layer:
    """A SwiGLU of the same FLOPs, k · F wide: what the layer would cost without a router."""
    wide = problem.shape.k * problem.shape.hidden
    up = problem.up.new_empty(2 * wide, problem.shape.dim).normal_(std=problem.shape.dim**-0.5).requires_grad_()
    down = problem.down.new_empty(problem.shape.dim, wide).normal_(std=wide**-0.5).requires_grad_()

    def run(x: Tensor) -> Tensor:
        gate, value = F.linear(x, up).chunk(2, -1)
        return F.linear(F.silu(gate) * value, down)

    return Layer(run, (up, down))


def plain(problem: Problem) -> Layer:
    """Plain torch: sort, index_select, two products for each expert, unsort, weighted sum."""
    gate, up, down = _weights(problem)
    k, num_experts = problem.shape.k, problem.shape.experts

    def run(x: Tensor) -> Tensor:
        weights, experts = _choose(x, gate, k)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=num_experts).tolist()
        outs = []
        for own_up, own_down, rows in zip(up, down, x.index_select(0, order // k).split(counts), strict=True):
            first, second = F.linear(rows, own_up).chunk(2, -1)
            outs.append(F.linear(F.silu(first) * second, own_down))
        rows = torch.cat(outs).index_select(0, order.argsort()).view(-1, k, x.shape[1])
        return (rows * weights[..., None]).sum(1).to(x.dtype)

    return Layer(run, (gate, up, down))


def grouped_mm(problem: Problem) -> Layer:
    """`F.grouped_mm` over gathered rows."""
    if problem.x.dtype != torch.bfloat16 and problem.x.is_cuda:
        raise NotRun("bfloat16 only")
    gate, up, down = _weights(problem)
    k, num_experts = problem.shape.k, problem.shape.experts

    def run(x: Tensor) -> Tensor:
        weights, experts = _choose(x, gate, k)
        order = experts.flatten().argsort(stable=True)
        ends = experts.flatten().bincount(minlength=num_experts).cumsum(0).int()
        hidden = F.grouped_mm(x.index_select(0, order // k), up.mT, offs=ends)
        first, second = hidden.chunk(2, -1)
        rows = F.grouped_mm(F.silu(first) * second, down.mT, offs=ends)
        rows = rows.index_select(0, order.argsort()).view(-1, k, x.shape[1])
        return (rows * weights[..., None]).sum(1).to(x.dtype)

    return Layer(run, (gate, up, down))


def compiled_grouped_mm(problem: Problem) -> Layer:
    """`F.grouped_mm` under `torch.compile`, compiled anew for each shape."""
    layer = grouped_mm(problem)
    torch.compiler.reset()
    return Layer(torch.compile(layer.run, dynamic=False), layer.parameters)


def _transformers(implementation: str) -> Callable[[Problem], Layer]:
    def make(problem: Problem) -> Layer:
        _needs("transformers")
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        shape = problem.shape
        if implementation == "batched_mm":
            # It gathers each choice's weights, and backward their gradients.
            gathered = 2 * problem.x.element_size() * shape.tokens * shape.k * 3 * shape.hidden * shape.dim
            if gathered > 2 * GIGABYTE:
                raise NotRun(f"would gather {gathered / GIGABYTE:.0f} GB of weights")
        config = Qwen3MoeConfig(
            hidden_size=shape.dim,
            moe_intermediate_size=shape.hidden,
            num_experts=shape.experts,
            num_experts_per_tok=shape.k,
            norm_topk_prob=True,
            hidden_act="silu",
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            block = Qwen3MoeSparseMoeBlock(config)
        weights = {"experts.gate_up_proj": problem.up, "experts.down_proj": problem.down}
        block.load_state_dict({"gate.weight": problem.gate, **weights}, assign=True)
        return Layer(lambda x: block(x[None])[0], list(block.parameters()))

    return make


class _Expert(nn.Module):
    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.linear(x, self.up).chunk(2, -1)
        return F.linear(F.silu(first) * second, self.down)


def deepspeed(problem: Problem) -> Layer:
    """DeepSpeed's MoE layer with its own gate, every token kept (`drop_tokens=False`), in a group of one process."""
    _needs("deepspeed")
    import deepspeed as ds
    from deepspeed.moe.layer import MoE

    shape = problem.shape
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        backend = "gloo" if problem.x.device.type == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    ds.init_distributed(dist_init_required=False, verbose=False)
    how: dict[str, Any] = {"k": shape.k, "drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
    layer = MoE(shape.dim, _Expert(problem.up[0], problem.down[0]), num_experts=shape.experts, **how)
    layer.set_deepspeed_parallelism()
    layer = layer.to(device=problem.x.device, dtype=problem.x.dtype)
    inner = layer.deepspeed_moe
    with torch.no_grad():
        inner.gate.wg.weight.copy_(problem.gate)
        for expert, up, down in zip(inner.experts.deepspeed_experts, problem.up, problem.down, strict=True):
            expert.up.data, expert.down.data = up, down
    return Layer(lambda x: layer(x[None])[0][0], list(layer.parameters()))


def liger(problem: Problem) -> Layer:
    """Measures its tiles at the first call. Its float32 products are TF32, which the check detects.

    In Triton's interpreter, where there is no device's clock, it gets its first tiles.
    """
    function = _needs("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    if not problem.x.is_cuda:
        keep_tiles_of_liger(0, 10_000)
    gate, up, down = _weights(problem)

    def run(x: Tensor) -> Tensor:
        weights, experts = _choose(x, gate, problem.shape.k)
        return function.apply(x, up, down, experts.int(), weights)

    return Layer(run, (gate, up, down))


def keep_tiles_of_liger(first: int, step: int) -> None:
    """Has this process' Liger try, of each kernel's tiles, that with the number `first` and each `step`th after it."""
    for module in ("fused_moe", "fused_moe_kernels"):
        for kernel in vars(_needs(f"liger_kernel.ops.{module}")).values():
            if hasattr(kernel, "configs"):
                kernel.configs = kernel.configs[first::step] or kernel.configs[:1]


def scattermoe(problem: Problem) -> Layer:
    mlp = _needs("scattermoe.mlp")
    # Its float32 products are TF32 by default; the other implementations' are not.
    _needs("scattermoe.kernels.ops").ALLOW_TF32 = problem.x.dtype != torch.float32
    shape = problem.shape
    gate, _, _ = _weights(problem)
    with torch.device("meta"):
        experts = mlp.GLUMLP(shape.dim, shape.hidden, shape.experts, shape.k, activation=nn.SiLU())
    # Its activation applies to the second half.
    weights = {"experts.weight": problem.up.roll(shape.hidden, 1), "output_experts.weight": problem.down}
    experts.load_state_dict(weights, assign=True)

    def run(x: Tensor) -> Tensor:
        weights, chosen = _choose(x, gate, shape.k)
        return experts(x, weights.to(x.dtype), chosen)

    return Layer(run, (gate, *experts.parameters()))


_EVERYWHERE: Mapping[str, Callable[[Problem], Layer]] = {
    "dense": dense,
    "moec": moec,
    "plain torch": plain,
    "transformers eager": _transformers("eager"),
    "transformers grouped_mm": _transformers("grouped_mm"),
    "transformers batched_mm": _transformers("batched_mm"),
    "DeepSpeed": deepspeed,
}
VARIANTS: Mapping[str, Callable[[Problem], Layer]] = {
    "moec in a graph": moec_in_a_graph,
    "moec by kernels": moec_by_kernels,
    "moec by grouped_mm": moec_by_grouped_mm,
}
"""moec in ways that it may not choose itself."""

IMPLEMENTATIONS: Mapping[str, Mapping[str, Callable[[Problem], Layer]]] = {
    "cpu": _EVERYWHERE,
    "cuda": {
        **_EVERYWHERE,
        "F.grouped_mm": grouped_mm,
        "F.grouped_mm compiled": compiled_grouped_mm,
        "Liger": liger,
        "ScatterMoE": scattermoe,
    },
}
