"""Every op there is. Importing this package registers them all."""

from moec.passes.ir.ops.collective import AllReduce, AllToAll, Collective, ExchangeCounts
from moec.passes.ir.ops.control import Call
from moec.passes.ir.ops.dense import (
    ACTIVATION_PARTS,
    Activation,
    Add,
    AddBias,
    Attention,
    Embed,
    EmbedPositions,
    LayerNorm,
    Linear,
    RmsNorm,
    Rope,
    Router,
)
from moec.passes.ir.ops.loss import CountLabels, CrossEntropy, Mean
from moec.passes.ir.ops.moe import Combine, ExpertMlp, Permute, Route, SwitchLoss, WeightedSum, ZLoss
from moec.passes.ir.ops.paths import Mix, SigmoidGate

__all__ = [
    "ACTIVATION_PARTS",
    "Activation",
    "Add",
    "AddBias",
    "AllReduce",
    "AllToAll",
    "Attention",
    "Call",
    "Collective",
    "Combine",
    "CountLabels",
    "CrossEntropy",
    "Embed",
    "EmbedPositions",
    "ExchangeCounts",
    "ExpertMlp",
    "LayerNorm",
    "Linear",
    "Mean",
    "Mix",
    "Permute",
    "RmsNorm",
    "Rope",
    "Route",
    "Router",
    "SigmoidGate",
    "SwitchLoss",
    "WeightedSum",
    "ZLoss",
]
