"""Shapes of the kernels that count choices and move rows: queues of experts, places of rows, and slots of copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from moec.codegen.kernels.kernel_shape import MAX_EXPERTS, KernelShape, accumulator, power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesShape(KernelShape):
    """Each choice's index in its expert's queue: one queue per sequence and j-th choice; with k 1, one for all choices.

    The kernels count and do not sort. The indices decide the order of rows, with a capacity or without.
    """

    template: ClassVar[str] = "queues"
    experts: int
    k: int

    def constants(self) -> dict[str, Any]:
        """Blocks of about 8,192 comparisons; about 2,048 counts summed at a time."""
        width = power_of_two(self.experts)
        narrow_block, wide_block = min(4, width), min(32, width)
        return {
            "EP": width,
            "BLOCK": max(1, min(256, 8192 // width)),
            "BLOCK_E": narrow_block,
            "SCAN": 2048 // narrow_block,
            "WIDE_E": wide_block,
            "STEP": min(128, 2048 // wide_block),
        }

    def pointers(self) -> dict[str, str]:
        """Counts within blocks are 32 bits wide; choices, places and operators' results are 64 bits wide."""
        wide = ("experts_ptr", "queues_ptr", "totals_ptr", "starts_ptr", "kept_ptr", "positions_ptr")
        return {"counts_ptr": "i32", **dict.fromkeys(wide, "i64")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacesShape(KernelShape):
    """Rows copied to places, and each token's weighted sum of its rows, with their gradients."""

    template: ClassVar[str] = "places"
    k: int
    dim: int
    dtype: str
    weights: str

    def constants(self) -> dict[str, Any]:
        """At most 2,048 columns at a time, and about 4,096 zeros."""
        width = min(2048, power_of_two(self.dim))
        return {"BLOCK_D": width, "ROWS": max(1, min(64, 4096 // width)), "BLOCK": 1024}

    def pointers(self) -> dict[str, str]:
        """Places, counts of rows, marks of taken places, and the router's weights."""
        return {
            "positions_ptr": "i64",
            "counts_ptr": "i64",
            "order_ptr": "i32",
            "taken_ptr": "i8",
            "parts_ptr": accumulator(self.dtype),
            **dict.fromkeys(("weights_ptr", "grad_weights_ptr"), self.weights),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsShape(KernelShape):
    """Rows of experts among the ranks that have copies of them. All integers have 64 bits."""

    template: ClassVar[str] = "slots"
    experts: int
    ranks: int
    slots: int

    def constants(self) -> dict[str, Any]:
        """About 1,024 quotas summed at a time."""
        ranks = power_of_two(self.ranks)
        return {
            "EP": power_of_two(self.experts),
            "RP": ranks,
            "SP": power_of_two(self.slots),
            "STEP": max(1, 1024 // ranks),
            "MOST": MAX_EXPERTS,
        }

    def pointers(self) -> dict[str, str]:
        names = ("counts", "table", "numbers", "totals", "keys", "quotas", "order", "sent", "ends", "slots", "received")
        return {f"{name}_ptr": "i64" for name in names}

    def options(self, kernel: str, family: str) -> dict[str, int]:
        """Few warps: `split` adds up over ranks hundreds of times, one after the other, which warps do through shared
        memory."""
        width = max(power_of_two(self.experts), 2 * power_of_two(self.ranks))
        return {"num_warps": max(1, min(8, width // 256))}
