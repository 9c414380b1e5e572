"""A block as a pure function: `module(*inputs, *settings, *states, *tables, *weights)`.

A layer's number comes after the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from moec.codegen.emit.emit_attention import ATTENTION
from moec.codegen.emit.emit_dense import DENSE
from moec.codegen.emit.emit_images import IMAGES
from moec.codegen.emit.emit_loss import LOSS
from moec.codegen.emit.emit_mixtures import MIXTURES
from moec.codegen.emit.emit_sampling import SAMPLING
from moec.codegen.emit.emit_segments import SEGMENTS
from moec.codegen.emit.emit_tokens import TOKENS
from moec.codegen.emit.emit_windows import WINDOWS
from moec.codegen.emit.emitter import Emissions, Emitter, WaysOf, info_of, site_of, target_name
from moec.codegen.emit.gating.emit_balance import BALANCE
from moec.codegen.emit.gating.emit_chosen_heads import CHOSEN_HEADS
from moec.codegen.emit.gating.emit_gates import GATES
from moec.codegen.emit.gating.emit_loads import LOADS
from moec.codegen.emit.gating.emit_merge import MERGE
from moec.codegen.emit.gating.emit_nested import NESTED
from moec.codegen.emit.gating.emit_random_gates import RANDOM_GATES
from moec.codegen.emit.gating.emit_replay import REPLAY
from moec.codegen.emit.gating.emit_selectors import SELECTORS
from moec.codegen.emit.gating.emit_soft import SOFT
from moec.codegen.emit.gating.emit_states import STATES
from moec.codegen.emit.gating.emit_topology import TOPOLOGY
from moec.codegen.emit.operators import emit_operator
from moec.codegen.emit.recompute import RecomputedLayer
from moec.passes.ir import Block, Op, Output, Parameter, Program, State, Table

EMISSIONS: Emissions = {
    **{kind: emit_operator for kind in Op.registry.values() if kind.operator},
    **ATTENTION,
    **CHOSEN_HEADS,
    **DENSE,
    **IMAGES,
    **GATES,
    **RANDOM_GATES,
    **SAMPLING,
    **SELECTORS,
    **MERGE,
    **MIXTURES,
    **SOFT,
    **NESTED,
    **WINDOWS,
    **TOKENS,
    **STATES,
    **BALANCE,
    **LOADS,
    **LOSS,
    **REPLAY,
    **SEGMENTS,
    **TOPOLOGY,
}
"""How each op is emitted."""
NOTING = ("moec.route.default", "moec.note_scores.default")
"""The operators that note tokens without scores."""


@dataclass(frozen=True, slots=True)
class Function:
    """A block as a function of inputs, settings, states, tables and weights, in this order; it returns `results`.

    `module` is its graph, or a `RecomputedLayer` around it. `users` maps each weight to the first op that uses it.
    `routers` are the ops of gates, one for each call of an operator of `NOTING`, in order.
    """

    module: nn.Module
    settings: tuple[str, ...]
    states: tuple[State, ...]
    tables: tuple[Table, ...]
    parameters: tuple[Parameter, ...]
    results: tuple[Output, ...]
    users: Mapping[str, Op]
    routers: tuple[Op, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(parameter.name for parameter in self.parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        return self  # a function has no state

    def sites(self, layer: int | None = None) -> dict[str, str]:
        """The part of the model that uses each weight first, by the weight's name."""
        return {name: site_of(self.users[name], layer) if name in self.users else name for name in self.weights}


def emit_function(
    program: Program, block: str, *, groups: str = "", float64: bool = False, ways: WaysOf | None = None
) -> Function:
    """The block called `block` as a function.

    The names of its process groups begin with `groups`. `float64` replaces every floating dtype inside by float64.
    `ways` says how ops of experts compute their products.
    """
    source = program.block(block)
    graph = emit_graph(program, source, groups=groups, float64=float64, ways=ways)
    module = fx.GraphModule(nn.Module(), graph, class_name="Block")
    return Function(
        RecomputedLayer(module) if source.recompute == "layer" else module,
        tuple(s.name for s in source.settings),
        source.states,
        source.tables,
        source.parameters,
        source.outputs,
        weight_users(source),
        _routers(graph),
    )


def emit_graph(
    program: Program, block: Block, *, groups: str = "", float64: bool = False, ways: WaysOf | None = None
) -> fx.Graph:
    """The nodes of a block; layers that it calls are `call_module` nodes, for a caller that runs them."""
    emitter = Emitter(program, block, groups, float64, ways)
    for op in block.ops:
        EMISSIONS[type(op)](emitter, op)
    return emitter.finish()


def _routers(graph: fx.Graph) -> tuple[Op, ...]:
    calls = (info_of(node).op for node in graph.nodes if target_name(node) in NOTING)
    return tuple(op for op in calls if op is not None)


def last_uses(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that no later node uses; not for outputs."""
    uses: dict[fx.Node, list[fx.Node]] = {}
    used_later: set[fx.Node] = set()
    for node in reversed(list(nodes)):
        for used in node.all_input_nodes:
            if used not in used_later and node.op != "output":
                uses.setdefault(node, []).append(used)
            used_later.add(used)
    return uses


def weight_users(block: Block) -> dict[str, Op]:
    """The first op that uses each parameter, by the parameter's name."""
    used = ((name, op) for op in reversed(block.ops) for name in op.operands)
    return {name[1:]: op for name, op in used if name.startswith("@")}
