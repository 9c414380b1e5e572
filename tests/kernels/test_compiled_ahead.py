"""What `job.build` compiles ahead of time is what the operators launch: nothing is compiled in a training step.

Triton's own launcher chooses the variants, for an sm_90 that is not there: it compiles, and launches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.runtime import driver

import moec
from moec.codegen.kernels.plan_kernels import kernels_of, products_of
from moec.codegen.kernels.plan_ways import ways_text
from moec.codegen.kernels.stored_tiles import Entry, StoredTiles
from moec.codegen.kernels.tiles import Tile, Ways
from moec.codegen.plan import Plan
from moec.passes.ir.ops import ExpertMlp, MixtureMlp
from moec.runtime.backends.triton import triton_backend, triton_warm
from moec.runtime.backends.triton.triton_compile import TARGETS
from moec.runtime.backends.triton.triton_launch import Kernels, aligned
from moec.runtime.backends.triton.triton_modules import module_of
from moec.runtime.backends.triton.triton_tiles import target_at
from moec.runtime.backends.triton.triton_warm import Progress, compile_ahead

CPU = torch.device("cpu")
SMALL = Ways(*[Tile(16, 16, 16, 4, 2)] * 6)

TEXT = """
device "toy" { kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak { fp32 = 1TFLOPS } }
model "tiny" {
  vocab = 8; dim = 64; depth = 1; dtype = fp32
  layers {
    attention = mha(heads = 2)
    moe { experts = 4 * swiglu(32); gate = topk(2, normalize = true); BALANCE }
  }
}
cluster "all" { device = "toy"; level "process" { size = RANKS } }
train { batch = 2; sequence = 16; optimizer = adamw(lr = 1e-2) }
parallel { ep = RANKS }
"""


class Sm90:
    """As much of a driver as the launcher asks for before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return TARGETS["sm_90"]


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_only(kernels: Kernels, kernel: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if all(grid):
            getattr(kernels.module, kernel).warmup(
                *map(aligned, arguments), grid=grid, enable_fp_fusion=True, **options
            )

    monkeypatch.setattr(Kernels, "launch", compile_only)
    monkeypatch.setattr("moec.runtime.backends.triton.triton_routing.note_or_refuse", lambda *_: None)
    monkeypatch.setattr("moec.runtime.backends.triton.triton_experts._refuse_other_sum", lambda *_: None)
    for module in ("triton_rows", "triton_mixture"):
        monkeypatch.setattr(f"moec.runtime.backends.triton.{module}.refuse_out_of_range", lambda *_: None)
    monkeypatch.setattr(driver, "_active", Sm90())


def functions_of(plan: Plan) -> Iterable[Any]:
    functions = {
        id(function): function
        for kernel in kernels_of(plan, target_at(CPU))
        for function in vars(module_of(kernel.shape)).values()
        if isinstance(function, triton.JITFunction)
    }
    return functions.values()


def compiled(plan: Plan) -> int:
    """How many variants of the plan's kernels are in memory."""
    return sum(len(caches[0]) for function in functions_of(plan) for caches in function.device_caches.values())


def plan_of(ranks: int, balance: str = "") -> Plan:
    """A plan, none of whose kernels has been compiled in this process, in tiles that compile fast."""
    plan = moec.compile(TEXT.replace("RANKS", str(ranks)).replace("BALANCE", balance))
    entries = tuple(Entry.of(products.key, SMALL, None) for products in products_of(plan))
    plan = replace(plan, tiles=StoredTiles(device=target_at(CPU).name, triton=None, entries=entries))
    for function in functions_of(plan):
        function.device_caches.clear()
    return plan


def ways(plan: Plan, kind: type[Any]) -> str:
    block = next(block for block in plan.program.blocks if any(isinstance(op, kind) for op in block.ops))
    op = next(op for op in block.ops if isinstance(op, kind))
    return ways_text(plan, block, op, target_at(CPU))


def route(tokens: int, balanced: bool) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(1, tokens, 4)
    probabilities, weights, _ = triton_backend.route(logits, None, 2, "softmax", "before", True)
    experts = torch.zeros(1, tokens, 2, dtype=torch.int64)
    for of_all in (None, probabilities) if balanced else (None,):
        triton_backend.route_backward(logits, of_all, weights, weights, experts, "softmax", "before", True)
    return weights, experts


@pytest.mark.parametrize("balance", ["", "balance = [switch_loss(0.01)]"])
def test_a_step_of_a_local_mixture_launches_what_was_compiled_for_any_number_of_tokens(balance: str) -> None:
    plan = plan_of(1, balance)
    names: list[str] = []
    number = compile_ahead(plan, CPU, lambda *seen: names.append(seen[2]))
    assert number == len(names) == compiled(plan)
    assert {"route", "count", "table", "invert", "up", "down_backward", "up_weights", "add_parts"} <= set(names)
    up, down = (torch.zeros(s) for s in ((4, 2, 32, 64), (4, 64, 32)))
    how = ("swiglu", None, None, ways(plan, MixtureMlp))
    for tokens in (32, 16, 7, 1):
        x = torch.zeros(1, tokens, 64)
        weights, experts = route(tokens, balanced=bool(balance))
        mixed, counts, hidden, *saved = triton_backend.mixture_mlp(x, experts, weights, up, down, None, None, *how)
        triton_backend.mixture_mlp_backward(mixed, x, hidden, counts, *saved, weights, up, down, None, None, *how)
        assert compiled(plan) == number, tokens


def test_a_step_with_rows_from_other_ranks_launches_what_was_compiled_for_any_number_of_rows() -> None:
    plan = plan_of(2)
    number = compile_ahead(plan, CPU, lambda *_: None)
    assert number == compiled(plan)
    up, down = (torch.zeros(s) for s in ((2, 2, 32, 64), (2, 64, 32)))
    how = ("swiglu", None, None, ways(plan, ExpertMlp))
    for tokens in (16, 13, 3):
        x = torch.zeros(1, tokens, 64)
        _, experts = route(tokens, balanced=False)
        rows, counts, positions = triton_backend.permute(x, experts, 4)
        beside = torch.zeros(2 * tokens)
        given = (counts.view(2, 2), up, down, None, None, beside, *how)
        out, *saved = triton_backend.expert_mlp(rows, *given)
        mixed = triton_backend.sum_rows(out, positions, counts)
        grad = triton_backend.sum_rows_backward(mixed, positions, counts, rows.shape[:1])
        grad_rows, *_ = triton_backend.expert_mlp_backward(grad, rows, *saved, *given)
        triton_backend.permute_backward(grad_rows, positions)
        assert compiled(plan) == number, tokens


def test_a_tensor_inside_of_a_flat_buffer_launches_what_was_compiled() -> None:
    plan = plan_of(1)
    number = compile_ahead(plan, CPU, lambda *_: None)
    x, weights, up, down = (
        torch.zeros(1 + math.prod(shape))[1:].view(shape)  # 4 bytes behind the beginning
        for shape in ((1, 16, 64), (1, 16, 2), (4, 2, 32, 64), (4, 64, 32))
    )
    assert x.data_ptr() % 16
    experts, how = torch.zeros(1, 16, 2, dtype=torch.int64), ("swiglu", None, None, ways(plan, MixtureMlp))
    mixed, counts, hidden, *saved = triton_backend.mixture_mlp(x, experts, weights, up, down, None, None, *how)
    triton_backend.mixture_mlp_backward(mixed, x, hidden, counts, *saved, weights, up, down, None, None, *how)
    assert compiled(plan) == number


def test_progress_is_shown_where_compiling_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = Progress()
    quick(1, 2, "up")
    quick.done(2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(triton_warm, "SILENT", 0.0)
    slow, other_rank = Progress(), Progress(shows=False)
    for number, name in enumerate(("up", "down"), 1):
        slow(number, 2, name)
        other_rank(number, 2, name)
    slow.done(2)
    other_rank.done(2)
    assert capsys.readouterr().err.splitlines()[0] == "moec: compiling kernel 1 of 2 …"
