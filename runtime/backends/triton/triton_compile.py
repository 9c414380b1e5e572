"""Compiles rendered kernels ahead of time, for a device that need not be present."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moec.codegen.kernels.shapes import KernelShape, ProductShape
from moec.runtime.backends.triton.triton_modules import module_of

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""A100; H100 and H200; B200 and GB200; MI300X."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's resources on a target: registers and spilled bytes per thread, shared memory bytes per block."""

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int


def compile_kernels(shape: KernelShape, target: str, only: Collection[str] = ()) -> Iterator[Compiled]:
    """Compiles a shape's kernels for a target of `TARGETS`, as the backend launches them on aligned tensors.

    All of them where `only` names none.
    """
    for name, function in vars(module_of(shape)).items():
        if isinstance(function, triton.JITFunction) and not name.startswith("_") and (not only or name in only):
            options = {}
            if isinstance(shape, ProductShape):
                options = {"num_warps": shape.warps(name), "num_stages": shape.tile.stages}
            yield _compile(shape, function, target, options)


def _compile(shape: KernelShape, function: Any, target: str, options: Mapping[str, int]) -> Compiled:
    # Upper-case arguments are switches; the branches they leave out take no registers.
    switches = {name: True for name in function.arg_names if name.isupper()}
    signature = {name: "constexpr" if name in switches else _type(shape, name) for name in function.arg_names}
    # PyTorch's allocations are aligned, and so is every row whose width is a multiple of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(function.arg_names) if name.endswith("_ptr")
    }
    source = ASTSource(fn=function, signature=signature, constexprs=switches, attrs=aligned)
    made = triton.compile(source, target=TARGETS[target], options={**options, "enable_fp_fusion": True})
    registers, spilled = _of_cubin(made.asm["cubin"]) if "cubin" in made.asm else _of_amdgcn(made.asm["amdgcn"])
    return Compiled(function.__name__, target, registers, spilled, made.metadata.shared)


def _type(shape: KernelShape, name: str) -> str:
    if not name.endswith("_ptr"):
        return "i32"
    return "*" + shape.pointers().get(name, getattr(shape, "dtype", "i32"))


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes, from `cuobjdump`, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"REG:([0-9]+)", said), _number(r"STACK:([0-9]+)", said)


def _of_amdgcn(text: str) -> tuple[int, int]:
    """From the metadata at the end of the assembly; a spilled register has 4 bytes."""
    return _number(r"\.vgpr_count:\s+([0-9]+)", text), 4 * _number(r"\.vgpr_spill_count:\s+([0-9]+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])
