"""The graphs of a Program's blocks, built once and prepared for running node by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from moec.codegen.emit import WaysOf, emit_graph, last_uses
from moec.passes.ir import Output, Program, Recompute


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    """A graph with its results. `last_used_at` has, for each node, the values whose last use it is.

    `recompute` is the part of the graph that backward computes again.
    """

    graph: fx.Graph
    results: tuple[Output, ...]
    last_used_at: Mapping[fx.Node, list[fx.Node]]
    recompute: Recompute = "none"


class Graphs:
    """A Program's graphs, each built once."""

    def __init__(self, program: Program, *, float64: bool, ways: WaysOf | None = None) -> None:
        self.program, self._float64, self._ways = program, float64, ways
        self._built: dict[str, PreparedGraph] = {}

    def has(self, name: str) -> bool:
        """Whether the Program has a block called `name`."""
        return name in self.program.block_map

    def __getitem__(self, name: str) -> PreparedGraph:
        if name not in self._built:
            block = self.program.block(name)
            graph = emit_graph(self.program, block, float64=self._float64, ways=self._ways)
            self._built[name] = PreparedGraph(graph, block.outputs, last_uses(graph.nodes), block.recompute)
        return self._built[name]
