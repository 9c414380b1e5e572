"""The schema of `.moe` files: pydantic models, one file per room, and `Spec`, which holds them all."""

from __future__ import annotations

from typing import ClassVar

from moec.grammar.spec.base import Form, Node, Reference, Unit
from moec.grammar.spec.cluster import Cluster, ClusterText, Device, Level, Peak
from moec.grammar.spec.model import (
    Dropless,
    DType,
    Experts,
    Gelu,
    Gqa,
    Layer,
    Mha,
    Model,
    Moe,
    RmsNorm,
    Rope,
    SwiGLU,
    SwitchLoss,
    TokenEmbedding,
    TopK,
    ZLoss,
)
from moec.grammar.spec.training import AdamW, Parallel, Train, Uniform, Zipf


class Spec(Node):
    """A whole `.moe` file, resolved: validated, defaults filled, units converted, every value with its span."""

    word: ClassVar[str] = "file"
    form: ClassVar[Form] = "block"
    model: Model
    cluster: Cluster
    train: Train | None = None
    parallel: Parallel = Parallel()


__all__ = [
    "AdamW",
    "Cluster",
    "ClusterText",
    "DType",
    "Device",
    "Dropless",
    "Experts",
    "Gelu",
    "Gqa",
    "Layer",
    "Level",
    "Mha",
    "Model",
    "Moe",
    "Node",
    "Parallel",
    "Peak",
    "Reference",
    "RmsNorm",
    "Rope",
    "Spec",
    "SwiGLU",
    "SwitchLoss",
    "TokenEmbedding",
    "TopK",
    "Train",
    "Uniform",
    "Unit",
    "ZLoss",
    "Zipf",
]
