"""Compiles rendered kernels ahead of time, for a device that need not be present."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moec.codegen.kernels.kernel_shape import KernelShape
from moec.codegen.kernels.resources import Resources
from moec.runtime.backends.triton.triton_listings import bulk_copies, loops_of, serialized
from moec.runtime.backends.triton.triton_modules import kernels_in

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""A100; H100 and H200; B200 and GB200; MI300X."""

FAMILIES: Mapping[str, str] = {"sm_80": "ampere", "sm_90": "hopper", "sm_100": "hopper", "gfx942": "cdna"}
"""The targets' families, as the rule for tiles names them."""


def compile_kernels(
    shape: KernelShape, target: str, only: Collection[str] = (), *, disassemble: bool = False
) -> Iterator[Resources]:
    """Compiles a shape's kernels for a target of `TARGETS`, as the backend launches them on aligned tensors.

    All of them where `only` names none. `disassemble`: reads machine code too, for 0.4 s a kernel.
    """
    for name, function in kernels_in(shape, only):
        yield _compile(shape, function, target, shape.options(name, FAMILIES[target]), disassemble)


def _compile(
    shape: KernelShape, function: Any, target: str, options: Mapping[str, int], disassemble: bool
) -> Resources:
    # Upper-case arguments are switches; the branches they leave out take no registers.
    switches = {name: True for name in function.arg_names if name.isupper()}
    blocks = shape.blocks(function.__name__)
    signature = {
        name: "constexpr"
        if name in switches
        else _block_type(shape, blocks[name])
        if name in blocks
        else _type(shape, name)
        for name in function.arg_names
    }
    # PyTorch's allocations are aligned, and so is every row whose width is a multiple of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(function.arg_names) if name.endswith("_ptr")
    }
    source = ASTSource(fn=function, signature=signature, constexprs=switches, attrs=aligned)
    compiled = triton.compile(source, target=TARGETS[target], options={**options, "enable_fp_fusion": True})
    ptx, cubin = compiled.asm.get("ptx", ""), compiled.asm.get("cubin")
    registers, spilled = _amdgcn_usage(compiled.asm["amdgcn"]) if cubin is None else _cubin_usage(cubin)
    return Resources(
        kernel=function.__name__,
        target=target,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        bulk_copies=bulk_copies(ptx),
        loops=loops_of(compiled.asm["ttgir"], ptx),
        serialized=serialized(_cuobjdump(cubin, "-sass"), ptx) if disassemble and cubin is not None else None,
    )


def _type(shape: KernelShape, name: str) -> str:
    if not name.endswith("_ptr"):
        return "i32"
    return "*" + shape.pointers().get(name, getattr(shape, "dtype", "i32"))


def _block_type(shape: KernelShape, block: tuple[int, ...]) -> str:
    return f"tensordesc<{getattr(shape, 'dtype', 'fp32')}[{', '.join(map(str, block))}]>"


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread."""
    usage = _cuobjdump(cubin, "--dump-resource-usage")
    return _number(r"REG:([0-9]+)", usage), _number(r"STACK:([0-9]+)", usage)


def _cuobjdump(cubin: bytes, option: str) -> str:
    """The output of `cuobjdump`, which comes with Triton, for machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout


def _amdgcn_usage(text: str) -> tuple[int, int]:
    """Registers and spilled bytes, from the metadata at the end of the assembly; a spilled register has 4 bytes."""
    return _number(r"\.vgpr_count:\s+([0-9]+)", text), 4 * _number(r"\.vgpr_spill_count:\s+([0-9]+)", text)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, text
    return int(match[1])
