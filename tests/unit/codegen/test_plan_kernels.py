"""A plan's kernels: there for people, rendered again and compared, never run from the plan."""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from models import moe_text

from moec.codegen import kernels
from moec.codegen.folder import PlanError, canonical
from moec.codegen.kernels import MOST_EXPERTS, GatedShape, RouteShape, complaint, render
from moec.codegen.plan import Plan
from moec.codegen.plan_kernels import kernel_files, kernels_of
from moec.driver import compile as compile_source
from moec.driver import load

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compile_source(EXAMPLES / "mixtral_8x7b.moe")


def test_a_plan_for_accelerators_holds_its_kernels_and_they_cite_their_lines(plan: Plan) -> None:
    files = kernel_files(plan)
    assert {name.split("/")[1].split("_")[0] for name in files} == {
        "route", "queues", "places", "tiles", "up", "down",
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


def test_a_plan_for_processors_holds_none() -> None:
    assert kernel_files(compile_source(moe_text())) == {}


def test_an_edited_kernel_is_refused_even_with_digests_that_match(plan: Plan, tmp_path: Path) -> None:
    folder = plan.save(tmp_path / "mixtral.plan")
    assert load(folder).manifest == plan.manifest
    kernel = next((folder / "kernels").glob("route_*.py"))
    proof = tmp_path / "ran"
    kernel.write_text(f"open({str(proof)!r}, 'w')\n" + kernel.read_text())
    with pytest.raises(PlanError, match="it is not what moec writes for this plan"):
        load(folder)

    manifest = json.loads((folder / "plan.json").read_text())
    del manifest["digest"]
    manifest["files"][f"kernels/{kernel.name}"] = hashlib.sha256(kernel.read_bytes()).hexdigest()
    manifest["digest"] = hashlib.sha256(canonical(manifest)).hexdigest()
    (folder / "plan.json").write_bytes(canonical(manifest))
    with pytest.raises(PlanError, match="it is not what moec writes for this plan"):
        load(folder)
    assert not proof.exists()


def test_a_missing_kernel_is_refused(plan: Plan, tmp_path: Path) -> None:
    folder = plan.save(tmp_path / "mixtral.plan")
    next((folder / "kernels").glob("up_*.py")).unlink()
    with pytest.raises(PlanError, match="it is not what moec writes for this plan"):
        load(folder)


def test_a_kernel_that_only_the_plan_has_is_never_looked_at(plan: Plan, tmp_path: Path) -> None:
    folder = plan.save(tmp_path / "mixtral.plan")
    (folder / "kernels" / "route.py").write_text("raise SystemExit('ran')\n")
    assert load(folder).manifest == plan.manifest


def test_reading_a_plan_with_kernels_imports_neither_torch_nor_triton(plan: Plan, tmp_path: Path) -> None:
    folder = plan.save(tmp_path / "mixtral.plan")
    code = f"import moec, sys; moec.load({str(folder)!r}); assert not {{'torch', 'triton'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shapes_without_kernels_say_why() -> None:
    shape = RouteShape(experts=MOST_EXPERTS + 1, k=2, score="softmax", after=False, normalize=True, dtype="fp32")
    assert complaint(shape) == "kernels are for at most 2048 experts, not 2049"
    with pytest.raises(ValueError, match="at most 2048 experts"):
        render(shape)
    odd = RouteShape(experts=4, k=2, score='"""\nraise', after=False, normalize=True, dtype="fp32")
    assert complaint(odd) is not None


def test_no_kernel_adds_atomically() -> None:
    """One program writes each element: a sum that several programs add to has another order every time, or a race."""
    templates = sorted((Path(kernels.__file__).parent / "templates").glob("*.j2"))
    assert len(templates) > 8
    assert all("tl.atomic" not in template.read_text(encoding="utf-8") for template in templates)
