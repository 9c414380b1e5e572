"""Every op there is. Importing this package registers them all."""

from moec.passes.ir.ops.attention_ops import Attention, Clip, JoinShared, RepeatHeads, Rope
from moec.passes.ir.ops.control_ops import Call
from moec.passes.ir.ops.conversion import Conversion
from moec.passes.ir.ops.dense_conversions import (
    AllGather,
    AllGatherAlike,
    AllReduce,
    AllToAllPadded,
    CopyTo,
    KeepOnFirst,
    ReduceScatter,
    Slice,
)
from moec.passes.ir.ops.embedding_ops import Embed, EmbedPositions, LayerNorm, RmsNorm
from moec.passes.ir.ops.expert_linear_ops import ExpertLinear
from moec.passes.ir.ops.fused_ops import MixtureMlp, PermuteWeights, SumRows
from moec.passes.ir.ops.gating.balance_ops import CountChoices, LargestScores, SumGroups, SwitchLoss, WeightedSum, ZLoss
from moec.passes.ir.ops.gating.capacity_ops import Capacity, CountQueues, KeepChoices, LargestLoad, QueueStarts
from moec.passes.ir.ops.gating.chosen_head_ops import ChosenHeads, CountGroups, DetachedShares, MixHeads
from moec.passes.ir.ops.gating.gate_ops import AttendExperts, EveryExpert, HashRoute, RoundWeights, Route
from moec.passes.ir.ops.gating.group_gate_ops import BalancedAssignment, ChooseTokens
from moec.passes.ir.ops.gating.head_gate import GateHeads
from moec.passes.ir.ops.gating.load_ops import (
    ExpectedLoads,
    ExpertWeights,
    FirstChoices,
    GroupTotals,
    LoadsAbove,
    VariationLoss,
)
from moec.passes.ir.ops.gating.merge_ops import MergeExperts, MergeShares, SequenceLinear
from moec.passes.ir.ops.gating.nested_ops import NestedRoute, OuterChoices
from moec.passes.ir.ops.gating.queue_ops import BestScore, ChosenWeights, KeepBest, KeepFirst, Renormalize, Reroute
from moec.passes.ir.ops.gating.random_gate_ops import AddLearnedNoise, SecondAtRandom, Uniform
from moec.passes.ir.ops.gating.replay_ops import Replay, StackRoutes, TakeRoutes, WholeSequences
from moec.passes.ir.ops.gating.selector_ops import DecodeSelectors, SumOfTokens
from moec.passes.ir.ops.gating.soft_ops import SlotCombine, SlotInputs, SlotOutputs, SlotRows, SlotWeights
from moec.passes.ir.ops.gating.state_ops import MoveBias, SumSources
from moec.passes.ir.ops.gating.topology_ops import BoundFar, ChooseNear, DataRanks, TopologyLoss
from moec.passes.ir.ops.guest_ops import AssignSlots
from moec.passes.ir.ops.image_ops import Classify, FirstToken, GridWindows, MeanTokens, PatchEmbed, PatchNumbers
from moec.passes.ir.ops.linear_ops import Activation, Add, AddBias, Linear, Router, Scale
from moec.passes.ir.ops.loss_ops import CountLabels, CountTokens, CrossEntropy, Mean
from moec.passes.ir.ops.mixture_ops import Combine, ExpertMlp, Permute
from moec.passes.ir.ops.padded_ops import CombinePadded, ExpertMlpPadded, PermuteDynamic, PermutePadded
from moec.passes.ir.ops.padding_ops import CountRealTokens, MaskChoices, RealTokens
from moec.passes.ir.ops.part_ops import ConcatCounts, CountMade, SelectExperts
from moec.passes.ir.ops.path_ops import Mix, SigmoidGate
from moec.passes.ir.ops.ragged_conversions import AllToAll, ExchangeAndGatherCounts, ExchangeCounts, GatherCounts
from moec.passes.ir.ops.random_ops import AddNoise, Jitter, NormalNoise, TokenKeys
from moec.passes.ir.ops.sampling_ops import SampledWeights, SampleExperts
from moec.passes.ir.ops.segment_ops import CountInSegments, KeepInSegments, NumberSegments, SegmentLoss, Segments
from moec.passes.ir.ops.vocabulary_ops import CrossEntropyOfSums, LabelLogit, LogitMax, SumExp, Widen
from moec.passes.ir.ops.window_ops import WindowLinear, Windows

__all__ = [
    "Activation",
    "Add",
    "AddBias",
    "AddLearnedNoise",
    "AddNoise",
    "AllGather",
    "AllGatherAlike",
    "AllReduce",
    "AllToAll",
    "AllToAllPadded",
    "AssignSlots",
    "AttendExperts",
    "Attention",
    "BalancedAssignment",
    "BestScore",
    "BoundFar",
    "Call",
    "Capacity",
    "ChooseNear",
    "ChooseTokens",
    "ChosenHeads",
    "ChosenWeights",
    "Classify",
    "Clip",
    "Combine",
    "CombinePadded",
    "ConcatCounts",
    "Conversion",
    "CopyTo",
    "CountChoices",
    "CountGroups",
    "CountInSegments",
    "CountLabels",
    "CountMade",
    "CountQueues",
    "CountRealTokens",
    "CountTokens",
    "CrossEntropy",
    "CrossEntropyOfSums",
    "DataRanks",
    "DecodeSelectors",
    "DetachedShares",
    "Embed",
    "EmbedPositions",
    "EveryExpert",
    "ExchangeAndGatherCounts",
    "ExchangeCounts",
    "ExpectedLoads",
    "ExpertLinear",
    "ExpertMlp",
    "ExpertMlpPadded",
    "ExpertWeights",
    "FirstChoices",
    "FirstToken",
    "GateHeads",
    "GatherCounts",
    "GridWindows",
    "GroupTotals",
    "HashRoute",
    "Jitter",
    "JoinShared",
    "KeepBest",
    "KeepChoices",
    "KeepFirst",
    "KeepInSegments",
    "KeepOnFirst",
    "LabelLogit",
    "LargestLoad",
    "LargestScores",
    "LayerNorm",
    "Linear",
    "LoadsAbove",
    "LogitMax",
    "MaskChoices",
    "Mean",
    "MeanTokens",
    "MergeExperts",
    "MergeShares",
    "Mix",
    "MixHeads",
    "MixtureMlp",
    "MoveBias",
    "NestedRoute",
    "NormalNoise",
    "NumberSegments",
    "OuterChoices",
    "PatchEmbed",
    "PatchNumbers",
    "Permute",
    "PermuteDynamic",
    "PermutePadded",
    "PermuteWeights",
    "QueueStarts",
    "RealTokens",
    "ReduceScatter",
    "Renormalize",
    "RepeatHeads",
    "Replay",
    "Reroute",
    "RmsNorm",
    "Rope",
    "RoundWeights",
    "Route",
    "Router",
    "SampleExperts",
    "SampledWeights",
    "Scale",
    "SecondAtRandom",
    "SegmentLoss",
    "Segments",
    "SelectExperts",
    "SequenceLinear",
    "SigmoidGate",
    "Slice",
    "SlotCombine",
    "SlotInputs",
    "SlotOutputs",
    "SlotRows",
    "SlotWeights",
    "StackRoutes",
    "SumExp",
    "SumGroups",
    "SumOfTokens",
    "SumRows",
    "SumSources",
    "SwitchLoss",
    "TakeRoutes",
    "TokenKeys",
    "TopologyLoss",
    "Uniform",
    "VariationLoss",
    "WeightedSum",
    "WholeSequences",
    "Widen",
    "WindowLinear",
    "Windows",
    "ZLoss",
]
