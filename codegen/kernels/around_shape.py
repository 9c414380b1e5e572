"""The shape of the kernels around a library's grouped products: the work that our products do in their loops."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from moec.codegen.kernels.kernel_shape import accumulator, power_of_two
from moec.codegen.kernels.product_shapes import DownShape, ExpertsShape
from moec.codegen.kernels.tiles import GATHERING_KERNELS


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundShape(ExpertsShape):
    """Gathers, places and activates rows, for products that a library computes.

    Without a tile: the kernels work on rows, and need no table of tiles. `weighted`: there is one weight per row.
    """

    template: ClassVar[str] = "around"
    weighted: bool = False

    @classmethod
    def of(cls, down: DownShape) -> Self:
        """The shape around the products of the layer that has this projection."""
        return cls(**{field.name: getattr(down, field.name) for field in fields(cls)})

    def constants(self) -> dict[str, Any]:
        """About 2,048 elements of a tensor at a time, and no fewer than the 128 threads of a program.

        Each element then belongs to one thread, so that a kernel may write where it reads.
        """
        return {
            "G": self.kind.parts,
            "function": self.kind.function,
            "second": self.kind.second,
            "weighs": self.weighted or self.k > 0,
            "BLOCK_D": max(128, min(512, power_of_two(self.dim))),
            "BLOCK_F": max(128, min(512, power_of_two(self.hidden))),
            "half": power_of_two(self.experts) // 2,
        }

    def pointers(self) -> dict[str, str]:
        """The order of rows and the experts' offsets; weights of choices or rows, and the sums of their gradients."""
        wide = dict.fromkeys(("weights_ptr", "parts_ptr"), accumulator(self.dtype))
        return {"order_ptr": "i32", "offsets_ptr": "i32", **wide}

    def launched(self, by_library: Set[str]) -> tuple[str, ...]:
        """The kernels that run if a library computes the products of these names (`KERNELS`)."""
        moved = self.gathered or self.k > 0
        names = {
            "gather": moved and not by_library.isdisjoint(GATHERING_KERNELS),
            "activate": "up" in by_library,
            "place": "down" in by_library and (self.gathered or self.bias or self.weighted),
            "through": "down_backward" in by_library,
            "scatter": "up_backward" in by_library and self.gathered,
        }
        return tuple(name for name, runs in names.items() if runs)
