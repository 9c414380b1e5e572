"""Completes the gate `topology` with what it asks of the cluster and of the degrees."""

# Annotations are evaluated where they stand, with no `from __future__`: nodes read them.

from typing import Any

from moec.grammar.spec import Layer, Moe, Spec, Topology
from moec.passes.degrees.degrees import Degrees, choose_degrees


class PlacedTopology(Topology):
    """A `topology` with the attributes of its ops (`passes/ir/ops/gating/topology_ops.py`). No file writes it."""

    levels: tuple[int, ...]
    bandwidths: tuple[float, ...]
    parts: tuple[int, ...]
    tp: int
    ep: int

    @property
    def places(self) -> dict[str, Any]:
        """The attributes that all of its ops have."""
        return {"levels": self.levels, "parts": self.parts, "tp": self.tp, "ep": self.ep}


def with_places(spec: Spec, degrees: Degrees | None) -> Spec:
    """The Spec whose gates `topology` are all placed: layers with another `ep` become layers of their own.

    Where data-parallel ranks and experts are is what this gate means, so the reference has it, too. Without `degrees`
    they are the file's. Raises `DiagnosticError` for those of a file that do not fit.
    """
    if not any(moe is not None and isinstance(moe.gate, Topology) for moe in spec.subject.mixtures):
        return spec
    degrees = choose_degrees(spec) if degrees is None else degrees
    ep_of = degrees.ep_of
    if not spec.has_model:
        subject = spec.layer
        return spec.replace(layers=(subject.replace(moe=_placed(spec, subject.moe, degrees.tp, ep_of[0])),))
    known: dict[tuple[int, int], Layer] = {}
    layers = []
    for number, layer in enumerate(spec.model.layers):
        if layer.moe is not None and isinstance(layer.moe.gate, Topology):
            key = id(layer), ep_of[number]
            if key not in known:
                known[key] = layer.replace(moe=_placed(spec, layer.moe, degrees.tp, ep_of[number]))
            layer = known[key]
        layers.append(layer)
    return spec.replace(model=spec.model.replace(layers=tuple(layers)))


def _placed(spec: Spec, moe: Moe, tp: int, ep: int) -> Moe:
    """No rank sends or takes faster than its memory is read."""
    gate, memory = moe.gate, spec.cluster.device.bandwidth
    assert isinstance(gate, Topology)
    placed = PlacedTopology(
        k=gate.k,
        weight=gate.weight,
        share=gate.share,
        levels=tuple(level.size for level in spec.cluster.levels),
        bandwidths=(memory, *(min(memory, level.bandwidth or memory) for level in spec.cluster.levels)),
        parts=moe.counts,
        tp=tp,
        ep=ep,
    )
    spans = {name: span for name in ("", "k", "weight", "share") if (span := gate.span(name))}
    return moe.replace(gate=placed.with_spans(spans))
