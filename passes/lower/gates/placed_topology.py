"""Completes the gate `topology` with the cluster's levels and the degrees."""

# Annotations are evaluated where they stand, with no `from __future__`: nodes read them.

from typing import TYPE_CHECKING, Any

from moec.grammar.spec import Layer, Moe, Spec, Topology
from moec.grammar.stated import stage_ranks

if TYPE_CHECKING:
    from moec.passes.degrees.degrees import Degrees


class PlacedTopology(Topology):
    """A `topology` with the attributes of its ops (`passes/ir/ops/gating/topology_ops.py`). No file writes it."""

    levels: tuple[int, ...]
    bandwidths: tuple[float, ...]
    parts: tuple[int, ...]
    sharers: int
    ep: int
    etp: int

    @property
    def places(self) -> dict[str, Any]:
        """The attributes that all of its ops have."""
        degrees = {"sharers": self.sharers, "ep": self.ep, "etp": self.etp}
        return {"levels": self.levels, "parts": self.parts, **degrees}


def depends_on_ranks(spec: Spec) -> bool:
    """Whether a gate is `topology`: in the reference too it means where data-parallel ranks and experts are."""
    return any(moe is not None and isinstance(moe.gate, Topology) for moe in spec.subject.mixtures)


def with_places(spec: Spec, degrees: "Degrees | None") -> Spec:
    """The Spec whose gates `topology` are all placed: layers with another `ep` or `etp` become layers of their own.

    Without `degrees` each data-parallel rank is one rank, which has all experts.
    """
    if not depends_on_ranks(spec):
        return spec
    sharers, ep_of, etp_of = (degrees.sharers, degrees.ep_of, degrees.etp_of) if degrees else (1, {}, {})
    if not spec.has_model:
        moe = _placed(spec, spec.layer.moe, sharers, ep_of.get(0, 1), etp_of.get(0, 1))
        return spec.replace(layers=(spec.layer.replace(moe=moe),))
    placed_layers: dict[tuple[int, int, int], Layer] = {}
    layers = []
    for number, layer in enumerate(spec.model.layers):
        if layer.moe is not None and isinstance(layer.moe.gate, Topology):
            key = id(layer), ep_of.get(number, 1), etp_of.get(number, 1)
            if key not in placed_layers:
                placed_layers[key] = layer.replace(moe=_placed(spec, layer.moe, sharers, *key[1:]))
            layer = placed_layers[key]
        layers.append(layer)
    return spec.replace(model=spec.model.replace(layers=tuple(layers)))


def _placed(spec: Spec, moe: Moe, sharers: int, ep: int, etp: int) -> Moe:
    """No rank sends or takes faster than its memory is read."""
    gate, memory = moe.gate, spec.cluster.device.bandwidth
    assert isinstance(gate, Topology)
    gate_with_places = PlacedTopology(
        k=gate.k,
        weight=gate.weight,
        share=gate.share,
        levels=_levels_of_stage(spec),
        bandwidths=(memory, *(min(memory, level.bandwidth or memory) for level in spec.cluster.levels)),
        parts=moe.counts,
        sharers=sharers,
        ep=ep,
        etp=etp,
    )
    spans = {name: span for name in ("", "k", "weight", "share") if (span := gate.span(name))}
    return moe.replace(gate=gate_with_places.with_spans(spans))


def _levels_of_stage(spec: Spec) -> tuple[int, ...]:
    """The sizes of the cluster's levels inside of a pipeline stage: 1 of those that only join stages."""
    ranks, sizes = stage_ranks(spec), list[int]()
    for level in spec.cluster.levels:
        sizes.append(min(level.size, ranks))
        ranks //= sizes[-1]
    return tuple(sizes)
