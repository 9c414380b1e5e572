"""Which ranks cut a sequence of tokens."""

from __future__ import annotations

from moec.grammar.spec import Layer, Moa, Spec
from moec.grammar.stated import SharingDegrees, sharing_degrees


def sequence_pieces(spec: Spec, sharing: SharingDegrees | None = None) -> int:
    """The number of equal pieces that a plan cuts a sequence into somewhere: 1 where it cuts none.

    `cp` always cuts it. With `sequence_parallel` ranks of a tp group have a piece each between all parts of a layer.
    Without it a gate and its experts get a piece from each rank, so that none is sent twice, and an RMS norm over whole
    projections needs tokens with all their heads. `sharing` replaces the degrees that the file states.
    """
    sharing = sharing or sharing_degrees(spec)
    if not spec.has_model or spec.parallel.sequence_parallel:
        return sharing.sharers
    cut_over_tp = any(_cuts(layer) for layer in {id(layer): layer for layer in spec.model.layers}.values())
    return sharing.sharers if cut_over_tp else sharing.cp


def _cuts(layer: Layer) -> bool:
    attention = layer.attention
    return layer.moe is not None or isinstance(attention, Moa) or attention.qk_norm == "projection"
