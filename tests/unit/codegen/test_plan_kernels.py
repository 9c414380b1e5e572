"""A plan's kernels: listed from its Program, rendered for reading, never stored."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.plans import moe_text
from support.tables import each_row

from moec.codegen.folder import plan_files
from moec.codegen.kernels import shapes as kernels
from moec.codegen.kernels.kernel_shape import MAX_EXPERTS, complaint, render
from moec.codegen.kernels.plan_kernels import kernel_sources, kernels_of
from moec.codegen.kernels.shapes import GatedShape, RouteShape
from moec.codegen.plan import Plan
from moec.driver import compile as compile_source

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compile_source(EXAMPLES / "mixtral_8x7b.moe")


def test_the_kernels_of_a_plan_cite_their_lines(plan: Plan) -> None:
    files = kernel_sources(plan)
    assert {name.split("_")[0] for name in files} == {
        "route", "queues", "places", "tiles", "up", "down", "around",
    }  # fmt: skip
    (route,) = (text for name, text in files.items() if "route" in name)
    assert route.startswith("# layers[0..31] (mixtral_8x7b.moe:19)\n")
    assert "K = tl.constexpr(2)" in route
    for text in files.values():
        ast.parse(text)
        assert max(map(len, text.splitlines())) <= 130


def test_shapes_are_those_of_one_rank(plan: Plan) -> None:
    (up,) = (kernel.shape for kernel in kernels_of(plan) if kernel.shape.template == "up")
    # 8 experts over ep 8, whose ranks each send rows.
    assert (up.experts, up.dim, up.hidden, up.gathered, up.dtype) == (1, 4096, 14336, True, "bf16")


NESTED = ' layer "inner" { moe { experts = 3 * gelu(5); gate = topk(1, score = sigmoid) } }'
CALLS = {
    "topk(2)": {(8, 2, "softmax")},
    "expert_choice(2)": {(8, 1, "softmax")},
    "base": {(8, 1, "softmax")},
    "sparsemixer(2)": {(8, 1, "softmax")},
    "hash(2)": set(),
    "nested": {(8, 2, "softmax"), (3, 1, "sigmoid")},
}


@each_row("gate", CALLS)
def test_the_kernels_of_a_gate_are_those_that_its_op_calls(gate: str) -> None:
    """`expert_choice` has a choice of each expert, and calls `route` for one."""
    text = moe_text(ranks=1, ep=1, gate="topk(2)" if gate == "nested" else gate, balance="[]")
    text = 'use "devices/h100"\n' + text.replace("device = cpu", 'device = "h100"')
    if gate == "nested":
        text = text.replace("8 * swiglu(16)", '8 * mixture("inner")') + NESTED
    found = [kernel for kernel in kernels_of(compile_source(text)) if isinstance(kernel.shape, RouteShape)]
    assert {(one.shape.experts, one.shape.k, one.shape.score) for one in found} == CALLS[gate]
    assert all(one.launched == (("route",) if gate.startswith("sparsemixer") else ()) for one in found)


def test_dense_layers_have_the_kernels_of_their_activation_as_wide_as_on_one_rank() -> None:
    dense = """
    model "dense" {
      vocab = 64
      dim   = 64
      depth = 1
      layers { attention = mha(heads = 4); ffn = geglu(96) }
    }
    use "devices/h100"
    cluster "two" { device = "h100"; level "gpu" { size = 2 } }
    train { batch = 2; sequence = 64; optimizer = adamw(lr = 1e-2) }
    parallel { tp = 2 }
    """
    (kernel,) = kernels_of(compile_source(dense))
    assert kernel.shape == GatedShape(hidden=48, activation="geglu", dtype="bf16")


def test_a_plan_for_processors_has_none() -> None:
    assert kernel_sources(compile_source(moe_text())) == {}


def test_no_plan_stores_a_kernel(plan: Plan) -> None:
    assert set(plan_files(plan)) == {"plan.json", "spec.moe", "program.ir"}


def test_reading_a_plan_with_kernels_imports_neither_torch_nor_triton(plan: Plan, tmp_path: Path) -> None:
    folder = plan.save(tmp_path / "mixtral.plan")
    code = f"import moec, sys; moec.load({str(folder)!r}); assert not {{'torch', 'triton'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shapes_without_kernels_say_why() -> None:
    shape = RouteShape(experts=MAX_EXPERTS + 1, k=2, score="softmax", after=False, normalize=True, dtype="fp32")
    assert complaint(shape) == "kernels are for at most 2048 experts, not 2049"
    with pytest.raises(ValueError, match="at most 2048 experts"):
        render(shape)
    odd = RouteShape(experts=4, k=2, score='"""\nraise', after=False, normalize=True, dtype="fp32")
    assert complaint(odd) is not None


def test_no_kernel_adds_atomically() -> None:
    """One program writes each element: sums by several programs have another order every time, or a race."""
    templates = sorted((Path(kernels.__file__).parent / "templates").glob("*.j2"))
    assert len(templates) > 8
    assert all("tl.atomic" not in template.read_text(encoding="utf-8") for template in templates)
