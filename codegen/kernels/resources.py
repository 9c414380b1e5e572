"""A compiled kernel's loops, instructions, registers and memory, and the properties of its tile that are lost.

A loop without its pipeline computes the same numbers several times slower, and nothing else reveals it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moec.codegen.kernels.model.occupancy import blocks_per_sm
from moec.codegen.kernels.tiles import Tile
from moec.grammar.amounts import count


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over the depth of a product, as compiled.

    `buffers`: the steps that shared memory holds of the operand that it holds fewest steps of. `copies_pending` and
    `products_pending`: the groups of copies (cp.async) and of products (wgmma) that may still be running when the loop
    waits, at least; None if it waits for none. `instructions`: the shapes of its matrix instructions, as "m64n256k16".
    """

    buffers: int
    copies_pending: int | None
    products_pending: int | None
    instructions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resources:
    """A compiled kernel: registers and spilled bytes of a thread, shared memory bytes of a block, warps of a block.

    `bulk_copies`: its bulk-tensor copy instructions (TMA). `loops`: those that contain a product. `serialized`: the
    assembler made each wgmma wait for the one before; None if the machine code was not read.
    """

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    warps: int
    bulk_copies: int
    loops: tuple[Loop, ...]
    serialized: bool | None = None

    @property
    def blocks(self) -> int:
        """Blocks that one multiprocessor holds at a time."""
        return blocks_per_sm(self.target, self.registers, self.shared, self.warps)


def complaints(resources: Resources, tile: Tile, *, blocks: int = 1, bulk: bool = False) -> Iterator[str]:
    """A sentence for each property of a 16-bit product's tile that the compiler lost, on an NVIDIA device.

    `blocks`: the blocks of a multiprocessor that the tile was chosen for. `bulk`: weights are read by TMA.
    """
    if resources.spilled:
        yield f"a thread spills {resources.spilled} bytes"
    if resources.blocks < blocks:
        yield f"a multiprocessor holds {count(resources.blocks, 'block')}, the tile is chosen for {blocks}"
    if bulk and not resources.bulk_copies:
        yield "there are no bulk-tensor copies"
    if resources.serialized:
        yield "the assembler serialized wgmma: each waits for the one before"
    if not resources.loops:
        yield "there is no loop with a product"
    for loop in resources.loops:
        yield from _loop_complaints(loop, resources.target, tile)


def _loop_complaints(loop: Loop, target: str, tile: Tile) -> Iterator[str]:
    expected_columns = instruction_columns(target, tile)
    if loop.buffers < tile.stages:
        yield f"the loop has {count(loop.buffers, 'buffer')}, its tile asks for {tile.stages}"
    if loop.buffers > 2 and loop.copies_pending == 0:
        yield "each step waits for all copies (cp.async.wait_group 0)"
    if expected_columns is None:
        return
    columns = [int(shape.split("n")[1].split("k")[0]) for shape in loop.instructions if shape.startswith("m64")]
    if not columns:
        yield f"the loop has no wgmma, its tile asks for m64n{expected_columns}"
    elif min(columns) != expected_columns:
        yield f"the loop's wgmma is m64n{min(columns)}, its tile asks for m64n{expected_columns}"
    elif loop.products_pending == 0:
        yield "each step waits for its product (wgmma.wait_group 0)"


def instruction_columns(target: str, tile: Tile) -> int | None:
    """The columns of the warpgroup's matrix instruction (wgmma, 64 rows) of a tile; None if it has none.

    Four warps are a warpgroup. Triton assigns warpgroups to rows first, 64 rows each; the rest share the columns.
    """
    if target != "sm_90" or tile.rows < 64 or tile.warps < 4:
        return None
    groups = tile.warps // 4
    return min(256, tile.columns // max(1, groups * 64 // tile.rows))
