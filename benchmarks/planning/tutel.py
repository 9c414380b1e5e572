"""Tutel's single layer (arXiv 2206.03382, section 5): what its exchange, layout and overlap gain, by the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moec.grammar import load_text
from moec.passes.cost.exchange import Exchange
from moec.passes.cost.groups import group_along
from moec.passes.cost.overlap import overlapped
from moec.passes.cost.rates import ClusterRates
from moec.passes.cost.totals import BlockCost, costs_of
from moec.passes.ir.work.cost import Sent
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import compile_program

LAYER = """use "clusters/azure_ndv4"
device "a100_tf32" {{
  kind = cuda; memory = 80GB; bandwidth = 2_039GB/s; peak {{ fp32 = 156TFLOPS; bf16 = 312TFLOPS }}
}}
layer "single" {{
  dim = 2048; dtype = bf16; moe {{ experts = {experts} * relu(2048); gate = topk(2); capacity = factor(1.0) }}
}}
cluster "tutel" {{ from = azure_ndv4; device = a100_tf32; nodes = {nodes} }}
train {{ batch = {ranks}; sequence = 16_384 }}
parallel {{ ep = {ranks} }}
"""
"""The router's fp32 is TF32, PyTorch's default before 1.12; data sheet of June 2021."""
CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class SingleLayer:
    """The layer on `ranks` GPUs. Fairseq's slow kernels, the first step of Tutel's, are no property of a cluster."""

    ranks: int
    rates: ClusterRates
    cost: BlockCost

    @classmethod
    def on(cls, ranks: int) -> SingleLayer:
        text = LAYER.format(experts=2 * ranks, nodes=ranks // 8, ranks=ranks)
        spec = load_text(text, name="tutel.moe").unwrap()
        program = compile_program(spec, stop_after="schedule").program
        costs = costs_of(program, Workload.of_microbatch(spec, program))
        return cls(ranks, ClusterRates(spec.cluster), costs[program.layers[0].body])

    def seconds(self, exchange: Exchange, *, flexible: bool, chunks: int) -> float:
        """Both passes. Without the flexible layout an expert has a product for the rows of each rank."""
        return sum(self._pass(exchange, flexible, chunks, is_back=is_back) for is_back in (False, True))

    def _pass(self, exchange: Exchange, flexible: bool, chunks: int, *, is_back: bool) -> float:
        rates, rest, experts = replace(self.rates, exchange=exchange), 0.0, 0.0
        for _, of_op in self.cost.costs:
            direction = of_op.work.backward if is_back else of_op.work.forward
            if not of_op.of_experts:
                products = sum(rates.product(p, backward=is_back) for p in direction.products)
                rest += rates.moved(direction.moved) + products
                continue
            experts += rates.moved(direction.moved / chunks)
            for p in direction.products:
                groups = p.groups * (1 if flexible else self.ranks)
                experts += rates.product(replace(p, m=p.m / chunks, groups=groups), backward=is_back)
        sent = [s for _, of_op in self.cost.costs for s in of_op.sent]
        there, back = (self._sent(rates, s, chunks, is_back) for s in (sent[0], sent[-1]))
        return rest + overlapped(there, experts, back, chunks)

    def _sent(self, rates: ClusterRates, sent: Sent, chunks: int, is_back: bool) -> float:
        size, group = sent.backward if is_back else sent.forward, group_along("ep", self.cost.workload.meshes)
        return rates.collective("all_to_all", size / chunks, group)


def gains(ranks: int) -> dict[str, float]:
    """The speed-up of each of Tutel's steps over the ones before it, the best algorithm and number of chunks taken."""
    layer, linear, hierarchical = SingleLayer.on(ranks), Exchange(), Exchange("hierarchical")
    first = layer.seconds(linear, flexible=False, chunks=1)
    exchanged = min((layer.seconds(each, flexible=False, chunks=1), each.algorithm) for each in (linear, hierarchical))
    best = linear if exchanged[1] == "linear" else hierarchical
    flexible = layer.seconds(best, flexible=True, chunks=1)
    last = min(layer.seconds(best, flexible=True, chunks=chunks) for chunks in CHUNKS)
    return {
        "hierarchical": first / exchanged[0],
        "flexible": exchanged[0] / flexible,
        "overlap": flexible / last,
        "together": first / last,
    }


def published(row: Mapping[str, Any]) -> dict[str, float]:
    """The same of a row of `published.yaml`; `together` only where it states what its kernels gain."""
    steps = {word: row[word] for word in ("hierarchical", "flexible", "overlap") if word in row}
    return steps | ({"together": row["speedup"] / row["kernels"]} if "kernels" in row else {})
