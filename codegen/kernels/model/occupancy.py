"""The number of blocks of a kernel that one multiprocessor holds at a time, and the limits that decide it.

With one block, its prologue and epilogue leave the matrix units idle; with two, one block computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources of one multiprocessor, and the units of their allocation.

    `registers`: 32-bit registers of a multiprocessor (of one of its `schedulers`, if these do not share them),
    allocated in units of `register_unit` for each thread. `shared`: bytes of shared memory, of which each block uses
    `reserved` for the system and at most `block_shared` for itself. `threads`, `blocks`: the most that it holds.
    """

    registers: int
    register_unit: int
    shared: int
    reserved: int
    block_shared: int
    threads: int
    blocks: int
    warp: int = 32
    schedulers: int = 1


KB = 1024

LIMITS: Mapping[str, Limits] = {
    # CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; the tuning guides of Ampere,
    # Hopper and Blackwell, "Occupancy" and "Unified Shared Memory/L1/Texture Cache": 1 KB of each block is reserved.
    "sm_80": Limits(65_536, 8, 164 * KB, KB, 163 * KB, 2_048, 32),
    "sm_90": Limits(65_536, 8, 228 * KB, KB, 227 * KB, 2_048, 32),
    "sm_100": Limits(65_536, 8, 228 * KB, KB, 227 * KB, 2_048, 32),
    # ROCm documentation, "AMD GPU specifications": a compute unit has 512 KiB of vector registers, 64 KiB of LDS and 4
    # SIMDs; LLVM's `llvm-calc-occupancy`: at most 8 waves on a SIMD.
    "gfx942": Limits(512 * 64, 8, 64 * KB, 0, 64 * KB, 4 * 8 * 64, 32, warp=64, schedulers=4),
}
"""By compile target."""


def blocks_per_sm(target: str, registers: int, shared: int, warps: int) -> int:
    """Blocks of `warps` warps that fit one multiprocessor at a time; 0 if not even one fits.

    `registers` are those of a thread, `shared` the bytes of a block. Raises `KeyError` for a target not in `LIMITS`.
    """
    limits = LIMITS[target]
    if shared > limits.block_shared:
        return 0
    registers_of_warp = -(-max(registers, 1) // limits.register_unit) * limits.register_unit * limits.warp
    resident = limits.registers // registers_of_warp * limits.schedulers
    return min(
        resident // warps,
        limits.shared // (shared + limits.reserved) if shared + limits.reserved else limits.blocks,
        limits.threads // (warps * limits.warp),
        limits.blocks,
    )
