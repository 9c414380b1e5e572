"""What is read from compiled kernels, and the complaints about it. Kernels are compiled here, none is run."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from moec.codegen.kernels.model.occupancy import LIMITS, blocks_per_sm
from moec.codegen.kernels.resources import Loop, Resources, complaints, instruction_columns
from moec.codegen.kernels.tiles import Tile
from moec.runtime.backends.triton.triton_compile import TARGETS
from moec.runtime.backends.triton.triton_listings import bulk_copies, loops_of, serialized

TILE = Tile(128, 256, 64, 8, 4)
GOOD = Resources(
    kernel="down",
    target="sm_90",
    registers=168,
    spilled=0,
    shared=196_608,
    warps=8,
    bulk_copies=2,
    loops=(Loop(4, 4, 1, ("m64n256k16",)),),
    serialized=False,
)


def with_loop(**changed: object) -> Resources:
    return replace(GOOD, loops=(replace(GOOD.loops[0], **changed),))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (GOOD, []),
        (with_loop(buffers=2, copies_pending=0), ["the loop has 2 buffers, its tile asks for 4"]),
        (with_loop(copies_pending=0), ["each step waits for all copies (cp.async.wait_group 0)"]),
        (with_loop(instructions=("m64n128k16",)), ["the loop's wgmma is m64n128, its tile asks for m64n256"]),
        (with_loop(instructions=("m16n8k16",)), ["the loop has no wgmma, its tile asks for m64n256"]),
        (with_loop(products_pending=0), ["each step waits for its product (wgmma.wait_group 0)"]),
        (replace(GOOD, loops=()), ["there is no loop with a product"]),
        (replace(GOOD, spilled=8), ["a thread spills 8 bytes"]),
        (replace(GOOD, bulk_copies=0), ["there are no bulk-tensor copies"]),
        (replace(GOOD, serialized=True), ["the assembler serialized wgmma: each waits for the one before"]),
        (replace(GOOD, shared=232_449), ["a multiprocessor holds 0 blocks, the tile is chosen for 1"]),
    ],
)
def test_a_complaint_says_what_was_lost_and_nothing_else(made: Resources, said: list[str]) -> None:
    assert list(complaints(made, TILE, bulk=True)) == said


def test_fewer_blocks_than_the_tile_was_chosen_for_are_a_complaint() -> None:
    assert list(complaints(GOOD, TILE, blocks=2)) == ["a multiprocessor holds 1 block, the tile is chosen for 2"]
    halved = replace(GOOD, registers=128, shared=98_304)
    assert list(complaints(halved, TILE, blocks=2)) == []


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "blocks"),
    [
        ("sm_90", 128, 98_304, 8, 2),  # registers: 2 × 256 threads × 128 are all there are
        ("sm_90", 129, 98_304, 8, 1),  # rounded up to 136
        ("sm_90", 32, 115_712, 4, 2),  # shared: 2 × (113 + 1) KB are all there is
        ("sm_90", 32, 115_713, 4, 1),
        ("sm_90", 16, 0, 8, 8),  # threads: 2,048
        ("sm_90", 16, 0, 1, 32),  # blocks
        ("sm_90", 255, 232_448, 8, 1),
        ("sm_90", 255, 232_449, 8, 0),
        ("sm_80", 255, 166_912, 8, 1),
        ("sm_80", 255, 166_913, 8, 0),
        ("sm_80", 64, 82_944, 4, 2),
        ("gfx942", 128, 32_768, 4, 2),
        ("gfx942", 256, 0, 8, 1),
        ("gfx942", 512, 0, 8, 0),
    ],
)
def test_a_multiprocessor_holds_the_blocks_that_its_scarcest_resource_allows(
    target: str, registers: int, shared: int, warps: int, blocks: int
) -> None:
    assert blocks_per_sm(target, registers, shared, warps) == blocks


def test_every_compile_target_has_limits() -> None:
    assert set(LIMITS) == set(TARGETS)


@pytest.mark.parametrize(
    ("tile", "columns"),
    [
        (Tile(128, 256, 64, 8, 3), 256),
        (Tile(128, 128, 64, 8, 3), 128),
        (Tile(64, 256, 64, 4, 3), 256),
        (Tile(64, 256, 64, 8, 3), 128),  # two warpgroups for 64 rows share the columns
        (Tile(128, 64, 64, 4, 3), 64),
        (Tile(16, 256, 64, 4, 3), None),
        (Tile(64, 64, 64, 2, 3), None),
    ],
)
def test_warpgroups_that_are_left_over_share_the_columns(tile: Tile, columns: int | None) -> None:
    assert instruction_columns("sm_90", tile) == columns
    assert instruction_columns("sm_80", tile) is None


TTGIR = """
  tt.func public @two(%a_ptr: !tt.ptr<bf16>) {
    %a = ttg.local_alloc : () -> !ttg.memdesc<3x128x64xbf16, #shared, #smem, mutable>
    %b = ttg.local_alloc : () -> !ttg.memdesc<5x1x64x128xbf16, #shared, #smem, mutable>
    %outer:2 = scf.for %i = %c0 to %c9 step %c1 iter_args(%x = %c0, %y = %c0) -> (i32, i32) : i32 {
      %inner = scf.for %j = %c0 to %c9 step %c1 iter_args(%sum = %zero) -> (tensor<128x128xf32, #mma>) : i32 {
        %left = ttg.memdesc_index %a[%j] : !ttg.memdesc<3x128x64xbf16, #s, #m, mutable> -> !ttg.memdesc<128x64xbf16, #s>
        %slot = ttg.memdesc_index %b[%j] : !ttg.memdesc<5x1x64x128xbf16, #s> -> !ttg.memdesc<1x64x128xbf16, #s>
        %right = ttg.memdesc_reshape %slot : !ttg.memdesc<1x64x128xbf16, #s> -> !ttg.memdesc<64x128xbf16, #s>
        %dot = ttng.warp_group_dot %left, %right, %sum : !ttg.memdesc<128x64xbf16> * !ttg.memdesc<64x128xbf16> -> tensor
        %copied = ttg.async_wait %token {num = 2 : i32}
        %done:3 = ttng.warp_group_dot_wait %dot, %left, %right {pendings = 1 : i32} : tensor<128x128xf32, #mma>
        scf.if %last {
          %all:3 = ttng.warp_group_dot_wait %done#0, %left, %right {pendings = 0 : i32} : tensor<128x128xf32, #mma>
        }
        scf.yield %dot : tensor<128x128xf32, #mma>
      }
      scf.yield %x, %y : i32, i32
    }
    %plain = scf.for %k = %c0 to %c9 step %c1 iter_args(%sum2 = %zero) -> (tensor<16x16xf32, #mma>) : i32 {
      %one = tt.load %at : tensor<16x16x!tt.ptr<bf16>>
      %two = tt.dot %one, %one, %sum2 : tensor<16x16xbf16> * tensor<16x16xbf16> -> tensor<16x16xf32>
      scf.yield %two : tensor<16x16xf32>
    }
    %bias = scf.for %l = %c0 to %c9 step %c1 iter_args(%s = %zero) -> (tensor<16xf32>) : i32 {
      scf.yield %s : tensor<16xf32>
    }
"""


def test_buffers_are_those_of_the_operand_with_fewest_in_loops_with_a_product() -> None:
    assert loops_of(TTGIR, "") == (Loop(3, None, None, ()), Loop(1, None, None, ()))


PTX = """
$L__BB0_1:
$L__BB0_2:
	cp.async.wait_group 	4;
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, %p1, 1, 1, 0, 0;
	wgmma.wait_group.sync.aligned 1;
	cp.async.wait_group 	2;
	@%p6 bra 	$L__BB0_2;
	wgmma.wait_group.sync.aligned 0;
	cp.async.wait_group 	0;
	@%p7 bra 	$L__BB0_1;
$L__BB0_3:
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
	@%p8 bra 	$L__BB0_3;
	bra.uni 	$L__BB0_4;
$L__BB0_4:
	cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r4}], [%r5];
	ret;
"""


def test_waits_and_instructions_are_those_of_the_innermost_loop_around_a_product() -> None:
    assert loops_of(TTGIR, PTX) == (Loop(3, 2, 1, ("m64n128k16",)), Loop(1, None, None, ("m16n8k16",)))
    assert bulk_copies(PTX) == 1


def test_a_wait_in_a_branch_is_none_of_each_step() -> None:
    """A persistent loop has its epilogue in one, and that waits for all products."""
    persistent = PTX.replace("cp.async.wait_group 	2;", "wgmma.wait_group.sync.aligned 0;")
    assert loops_of(TTGIR, persistent)[0].products_pending == 1
    lost = TTGIR.replace("pendings = 1", "pendings = 0")
    assert loops_of(lost, persistent)[0].products_pending == 0


def test_without_a_loop_for_each_in_machine_code_every_loop_gets_what_all_have() -> None:
    one = PTX[: PTX.index("$L__BB0_3:")]
    assert loops_of(TTGIR, one) == (Loop(3, 2, 1, ("m64n128k16",)), Loop(1, 2, 1, ("m64n128k16",)))


@triton.jit
def product(a_ptr, b_ptr, out_ptr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    at = rows * 64 + columns
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def sass_of(ptx: str, folder: Path) -> str:
    (folder / "kernel.ptx").write_text(ptx)
    made = folder / "kernel.cubin"
    assembler = get_ptxas(90).path
    subprocess.run([assembler, "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", made], check=True)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, "-sass", made], capture_output=True, text=True, check=True).stdout


def test_products_that_the_assembler_serialized_are_found(tmp_path: Path) -> None:
    signature = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"}
    made = triton.compile(ASTSource(product, signature), target=TARGETS["sm_90"], options={"enable_fp_fusion": True})
    asynchronous = made.asm["ptx"]
    # A sum that is changed between two products makes the assembler wait for each.
    first, *others = re.split(r"(?=\n\s*wgmma\.mma_async)", asynchronous)[1:]
    assert len(others) == 3
    one = re.search(r"\{\s*(%\w+),", first)
    assert one is not None
    read_early = asynchronous.replace(others[0], f"\n\tmul.f32 {one[1]}, {one[1]}, 0f40000000;{others[0]}")
    assert "HGMMA" in sass_of(asynchronous, tmp_path)
    assert not serialized(sass_of(asynchronous, tmp_path), asynchronous)
    assert serialized(sass_of(read_early, tmp_path), read_early)
