"""A placed Program on meshes of several sizes at once takes, on each, the time of the plan compiled for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.tables import each_row

from moec.driver import run_passes, to_spec
from moec.passes.cost.step_time import step_seconds
from moec.passes.cost.totals import costs_of
from moec.passes.ir import Mesh
from moec.passes.ir.work.workload import Workload

RANKS, BATCH = 32, 64
TEXT = """
model "small" {{
  vocab = 64; dim = 64; depth = 2
  layers {{ attention = mha(heads = 16, rope = rope()); moe {{ experts = 8 * swiglu(64); gate = topk(2) }} }}
  layers 0 {{ ffn = swiglu(128) }}
}}
cluster "two" {{
  device = cpu; level "node" {{ size = 4; bandwidth = 4GB/s }}; level "rail" {{ size = 8; bandwidth = 1GB/s }}
}}
train {{ batch = {batch}; sequence = 16 }}
parallel {{ tp = {tp}; cp = {cp}; ep = {ep}; etp = {etp}; zero = {zero}; microbatches = {parts} }}
"""
WIDE = [(2, 2, 2, 2, 2), (4, 2, 4, 2, 4), (2, 4, 8, 2, 1), (4, 4, 2, 8, 4)]
"""tp, cp, ep, etp and micro-batches. All axes are wide: these plans have the same ops."""


@each_row("zero", [0, 1, 2, 3])
def test_one_placement_costs_every_size(zero: int) -> None:
    names = ("tp", "cp", "ep", "etp", "parts")
    texts = [TEXT.format(batch=BATCH, zero=zero, **dict(zip(names, sizes, strict=True))) for sizes in WIDE]
    specs = [to_spec(text) for text in texts]
    programs = [run_passes(spec, "schedule").program for spec in specs]
    each = [step_seconds(costs_of(p, Workload.of_microbatch(s, p)), p, s) for p, s in zip(programs, specs, strict=True)]

    tp, cp, ep, etp, parts = np.array(WIDE).T
    dense = (("dp", RANKS // (cp * tp)), ("cp", cp), ("tp", tp))
    experts = (("edp", RANKS // (ep * etp)), ("ep", ep), ("etp", etp))
    meshes = tuple(Mesh(m.name, dense if m.name == "dense" else experts) for m in programs[0].meshes)
    program = replace(programs[0], meshes=meshes, microbatches=parts)
    workload = replace(Workload.of(specs[0], program), batch=BATCH // parts)
    at_once = step_seconds(costs_of(program, workload), program, specs[0])
    for index, alone in enumerate(each):
        for term, seconds in alone.of.items():
            found = np.broadcast_to(at_once.of[term], len(WIDE))[index]
            assert found == pytest.approx(seconds, rel=1e-9), (WIDE[index], term)
