"""Completes the gate `topology` with the cluster's levels and the degrees."""

# Annotations are evaluated where they stand, with no `from __future__`: nodes read them.

from collections.abc import Mapping
from typing import Any

from moec.grammar.spec import Layer, Moe, Spec, Topology


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


def with_places(spec: Spec, sharers: int, ep_of: Mapping[int, int], etp_of: Mapping[int, int]) -> Spec:
    """The Spec whose gates `topology` are all placed: layers with another `ep` or `etp` become layers of their own.

    `sharers` ranks share a sequence. `ep_of` and `etp_of` give the degrees of layers, 1 for those that they lack.
    """
    if not depends_on_ranks(spec):
        return spec
    if not spec.has_model:
        subject = spec.layer
        return spec.replace(
            layers=(subject.replace(moe=_placed(spec, subject.moe, sharers, ep_of.get(0, 1), etp_of.get(0, 1))),)
        )
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
        levels=tuple(level.size for level in spec.cluster.levels),
        bandwidths=(memory, *(min(memory, level.bandwidth or memory) for level in spec.cluster.levels)),
        parts=moe.counts,
        sharers=sharers,
        ep=ep,
        etp=etp,
    )
    spans = {name: span for name in ("", "k", "weight", "share") if (span := gate.span(name))}
    return moe.replace(gate=gate_with_places.with_spans(spans))
