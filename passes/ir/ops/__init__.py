"""Every op there is. Importing this package registers them all."""

from moec.passes.ir.ops.attention import Attention, RepeatHeads, Rope
from moec.passes.ir.ops.capacity import (
    CombinePadded,
    CountQueues,
    ExpertMlpPadded,
    KeepChoices,
    LargestLoad,
    PermuteDynamic,
    PermutePadded,
    QueueStarts,
)
from moec.passes.ir.ops.collective import (
    AllGather,
    AllGatherAlike,
    AllReduce,
    AllToAll,
    AllToAllPadded,
    Collective,
    Conversion,
    CopyTo,
    ExchangeCounts,
    ReduceScatter,
    Slice,
)
from moec.passes.ir.ops.control import Call
from moec.passes.ir.ops.embedding import Embed, EmbedPositions, LayerNorm, RmsNorm
from moec.passes.ir.ops.fused import MixtureMlp, PermuteWeights, SumRows
from moec.passes.ir.ops.linear import ACTIVATION_PARTS, Activation, Add, AddBias, Linear, Router
from moec.passes.ir.ops.loss import CountLabels, CrossEntropy, Mean
from moec.passes.ir.ops.moe import Combine, CountChoices, ExpertMlp, Permute, Route, SwitchLoss, WeightedSum, ZLoss
from moec.passes.ir.ops.paths import Mix, SigmoidGate
from moec.passes.ir.ops.vocabulary import CrossEntropyOfSums, LabelLogit, LogitMax, SumExp, Widen

__all__ = [
    "ACTIVATION_PARTS",
    "Activation",
    "Add",
    "AddBias",
    "AllGather",
    "AllGatherAlike",
    "AllReduce",
    "AllToAll",
    "AllToAllPadded",
    "Attention",
    "Call",
    "Collective",
    "Combine",
    "CombinePadded",
    "Conversion",
    "CopyTo",
    "CountChoices",
    "CountLabels",
    "CountQueues",
    "CrossEntropy",
    "CrossEntropyOfSums",
    "Embed",
    "EmbedPositions",
    "ExchangeCounts",
    "ExpertMlp",
    "ExpertMlpPadded",
    "KeepChoices",
    "LabelLogit",
    "LargestLoad",
    "LayerNorm",
    "Linear",
    "LogitMax",
    "Mean",
    "Mix",
    "MixtureMlp",
    "Permute",
    "PermuteDynamic",
    "PermutePadded",
    "PermuteWeights",
    "QueueStarts",
    "ReduceScatter",
    "RepeatHeads",
    "RmsNorm",
    "Rope",
    "Route",
    "Router",
    "SigmoidGate",
    "Slice",
    "SumExp",
    "SumRows",
    "SwitchLoss",
    "WeightedSum",
    "Widen",
    "ZLoss",
]
