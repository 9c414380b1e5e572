"""`parallel { … }` and `adapt { … }`: over which degrees, and what may change between steps."""

from typing import Annotated, Literal, NamedTuple

from moec.grammar.spec.base import Doc, Node, NotYet, PositiveInt, at_least, at_most, more_than

Degree = PositiveInt | tuple[PositiveInt, ...] | Literal["auto"] | None
"""A number, a list to choose from, or `auto`; None where it is left to its default."""

Microbatches = Annotated[int, at_least(1), at_most(2**31)]

Schedule = Literal["gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zero_bubble", "zero_bubble_v", "dual_pipe_v"]
Stage = Annotated[int, at_least(0), at_most(3)]


class LayerRange(NamedTuple):
    """`4..8`: consecutive layers, the last one included; `4` alone is one layer."""

    first: Annotated[int, at_least(0)]
    last: Annotated[int, at_least(0)]

    def __str__(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}..{self.last}"


Recompute = Literal["none", "experts", "layer"]
Offload = Literal["none", "optimizer", "parameters", "auto"]


class ParallelLayers(Node):
    """`layers 1..20 { … }` in `parallel`: other degrees for some layers' experts; of two blocks the later counts."""

    word = "layers"
    form = "block"
    selects = True
    layers: Annotated[
        tuple[Annotated[int, at_least(0)], ...], Doc("the layers that these degrees are for, ascending")
    ] = ()
    ep: Annotated[Degree, Doc("expert parallel; divides the ranks and each such layer's experts")] = None
    etp: Annotated[Degree, Doc("expert slicing; divides the hidden widths of these layers' experts")] = None
    recompute: Annotated[
        Recompute | Literal["auto"] | None, NotYet(("auto",)), Doc("what is computed again in the backward pass")
    ] = None


class Parallel(Node):
    """`parallel { … }`: degrees. What is left out takes its default; a search chooses what is `auto` or a list."""

    word = "parallel"
    form = "block"
    dp: Annotated[Degree, Doc("data parallel; equals ranks / (pp * tp * cp)")] = None
    ep: Annotated[Degree, Doc("expert parallel; divides ranks / pp and every layer's experts")] = None
    tp: Annotated[Degree, Doc("tensor parallel, of all but experts; default 1")] = None
    pp: Annotated[
        Degree,
        Doc("pipeline parallel: number of ranks over which the layers are cut; divides the ranks; default 1"),
    ] = None
    virtual: Annotated[
        PositiveInt | None,
        Doc(
            "with `pp`, number of stages of each of its ranks; default 2 for `interleaved`, `looped_bfs`, "
            "`zero_bubble_v` and `dual_pipe_v`, which take no other number if their name ends in `v`, else 1"
        ),
    ] = None
    stages: Annotated[
        tuple[LayerRange, ...] | None,
        Doc("with `pp`, the layers of each of its pp * virtual stages; by default the slowest is as fast as it can be"),
    ] = None
    etp: Annotated[
        Degree,
        Doc(
            "tensor parallel inside an expert (expert slicing, Rajbhandari et al. 2022, arXiv 2201.05596, section 5); "
            "divides the hidden widths of experts, and ep * etp the ranks; default 1"
        ),
    ] = None
    cp: Annotated[
        Degree,
        Doc(
            "context parallel: cuts each sequence, and in attention its heads instead (Jacobs et al. 2023, arXiv "
            "2309.14509, section 3.1); cp * tp divides the heads, cp the sequence; default 1"
        ),
    ] = None
    zero: Annotated[
        Stage | tuple[Stage, ...] | Literal["auto"],
        Doc(
            "what ranks of `dp` and `cp` (of experts: `edp`) cut: 1 masters and optimizer states, 2 gradients too, "
            "3 weights too"
        ),
    ] = 0
    offload: Annotated[
        Offload, NotYet(("auto",)), Doc("what is kept in the host's memory; changes nothing where devices are CPUs")
    ] = "none"
    recompute: Annotated[
        Recompute | tuple[Recompute, ...] | Literal["auto"], Doc("what is computed again in the backward pass")
    ] = "none"
    microbatches: Annotated[
        Microbatches | tuple[Microbatches, ...] | Literal["auto"] | None,
        Doc(
            "number of micro-batches of a step; divides a rank's sequences; default 1, with `pp` the smallest number "
            "from `pp` on that the schedule takes"
        ),
    ] = None
    schedule: Annotated[
        Schedule | tuple[Schedule, ...] | Literal["auto"] | None,
        Doc("with `pp`, the order of its micro-batches; default `one_f_one_b`"),
    ] = None
    sequence_parallel: Annotated[
        bool,
        Doc(
            "with `tp`, cut each sequence over its ranks between sharded parts (Korthikanti et al. 2022, section 4.2.2)"
        ),
    ] = True
    layers: Annotated[tuple[ParallelLayers, ...], Doc("other degrees for some layers")] = ()


# ---- adapt -------------------------------------------------------------------------------------------


class Greedy(Node):
    """Experts move to other ranks with their masters and optimizer states, between two steps, where that pays within
    `horizon`: docs/guests.md."""

    word = "greedy"
    source = "SmartMoE, Zhai et al. 2023, algorithm 1"
    every: Annotated[PositiveInt, Doc("steps between two checks of the loads")] = 100
    threshold: Annotated[float, at_least(1), Doc("largest load over mean load up to which experts stay")] = 1.1


class Replicate(Node):
    """Busy experts get guests: their weights for a step, in slots kept for them on every rank."""

    word = "replicate"
    source = "EPLB, DeepSeek-V3, arXiv 2412.19437, section 3.4; SYMI, arXiv 2504.19925"
    positional = ("slots",)
    slots: Annotated[PositiveInt, Doc("number of slots on all ranks of an `ep` group together; `ep` divides it")]
    every: Annotated[PositiveInt, Doc("steps after which guests are chosen again")] = 10


class Shadow(Node):
    """Every rank has slots for guests of busy experts: their weights travel for a step in the place of their tokens."""

    word = "shadow"
    source = "FasterMoE, He et al. 2022, section 4.2"
    positional = ("most",)
    most: Annotated[PositiveInt, Doc("slots of each rank for guests: room for so many experts everywhere")] = 4
    every: Annotated[PositiveInt, Doc("steps after which guests are chosen again")] = 10


class Adapt(Node):
    """`adapt { … }`: what the runtime may choose again while it trains. Numerics do not change."""

    word = "adapt"
    form = "block"
    parallelism: Annotated[
        Annotated[int, at_least(0)] | tuple[Annotated[int, at_least(0)], ...] | Literal["auto"] | None,
        NotYet(),
        Doc("Tutel's r: 0 gathers the experts' weights, 1 sends tokens, more splits an expert over r ranks"),
    ] = None
    overlap: Annotated[Degree, NotYet(), Doc("parts of a batch whose exchange and computation overlap")] = None
    all_to_all: Annotated[
        Literal["linear", "hierarchical", "auto"] | None,
        NotYet(),
        Doc("algorithm that exchanges rows between nodes"),
    ] = None
    window: Annotated[PositiveInt, NotYet(), Doc("capacities that share one choice (Tutel's R)")] = 128
    placement: Annotated[
        Greedy | Replicate | Shadow | tuple[Greedy | Replicate | Shadow, ...] | None,
        Doc("how experts move between ranks, or where they have guests"),
    ] = None
    split: Annotated[
        Literal["fresh", "old", "even"],
        Doc(
            "how rows of an expert with guests are split among its copies: by the step's own counts, as those of the "
            "steps by which guests were chosen, or evenly"
        ),
    ] = "fresh"
    horizon: Annotated[
        float, more_than(0), Doc("with `greedy`, steps within which a move has to save more time than it takes")
    ] = 1000.0
    clock: Annotated[
        bool, Doc("with `greedy`, undo moves after which steps take longer; `false`: only loads decide")
    ] = True
