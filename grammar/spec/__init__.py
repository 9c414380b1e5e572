"""The schema of `.moe` files, one module per topic, and `Spec`, a whole file."""

from typing import Annotated

from moec.grammar.spec.attention import (
    Attention,
    Gqa,
    LayerNorm,
    Linear,
    Llama3,
    LongRope,
    Mha,
    Mla,
    Moa,
    Ntk,
    RmsNorm,
    Rope,
    Windows,
    Yarn,
)
from moec.grammar.spec.balance import (
    DeviceLoss,
    Dropless,
    Dynamic,
    Factor,
    GShardLoss,
    ImportanceLoss,
    LoadLoss,
    SequenceLoss,
    SwitchLoss,
    ZLoss,
)
from moec.grammar.spec.base import Doc, Form, Node, Reference, Unit
from moec.grammar.spec.cluster import Cluster, ClusterText, Device, DeviceRates, Level, LevelRates, Peak
from moec.grammar.spec.experts import (
    Activated,
    Conv,
    Experts,
    FeedForward,
    LinearMap,
    Lora,
    Mixture,
)
from moec.grammar.spec.gates import (
    AttentionRouter,
    Base,
    BatchPriority,
    Dense,
    DSelectK,
    ExpertChoice,
    Gate,
    GShard,
    Hash,
    NoisyTopK,
    Online,
    Smear,
    Soft,
    SparseMixer,
    Switch,
    TopK,
    Topology,
)
from moec.grammar.spec.images import Classes, Patches
from moec.grammar.spec.model import (
    DType,
    KeptPart,
    Layer,
    LayerModule,
    Model,
    Moe,
    Subject,
    TokenEmbedding,
    distinct_layers,
)
from moec.grammar.spec.optimizers import Optimizer, Update
from moec.grammar.spec.parallel import Adapt, Greedy, LayerRange, Parallel, ParallelLayers, Replicate, Shadow
from moec.grammar.spec.training import GateBound, LoadUse, Measured, ModelPart, Trace, Train, Uniform, Zipf


class Spec(Node):
    """A whole `.moe` file, resolved: validated, defaults filled, units converted, every value with its span.

    A file's subject is its `model`, or else its one `layer`; `model` is None for the second kind. Code that serves
    both kinds asks `subject`; code that needs a model is reached only where `has_model`.
    """

    word = "file"
    form = "block"
    model: Annotated[Model, Doc("the network")] = None  # type: ignore[assignment]
    layers: Annotated[
        tuple[LayerModule, ...], Doc("mixtures by themselves: experts of other mixtures, or modules for `moec.layer`")
    ] = ()
    cluster: Annotated[Cluster, Doc("the hardware that the model runs on")]
    train: Annotated[Train | None, Doc("how the model is trained")] = None
    parallel: Annotated[Parallel, Doc("degrees of parallelism: how the model is cut over ranks")] = Parallel()
    adapt: Annotated[Adapt | None, Doc("what may change between steps")] = None

    @property
    def has_model(self) -> bool:
        """Whether the subject is a `model`."""
        return self.__dict__["model"] is not None

    @property
    def layer(self) -> LayerModule:
        """The one `layer` of a file without a model that no other contains."""
        used = {part.body.name for layer in self.layers for part in layer.moe.parts if isinstance(part.body, Mixture)}
        (layer,) = (layer for layer in self.layers if layer.name not in used)
        return layer

    @property
    def subject(self) -> Subject:
        """What the file compiles to."""
        own = self.model.subject if self.has_model else self.layer.subject
        return own._replace(inner={layer.name: layer.moe for layer in self.layers})

    @property
    def update(self) -> Update:
        """The optimizer of `train`, else AdamW with its defaults."""
        return Update(self.train.optimizer, self.train.state) if self.train else Update()

    @property
    def sequence(self) -> int | None:
        """Tokens of a sequence in training: an image's patches, or `train.sequence`, else `context`, else None."""
        if self.has_model and self.model.length is not None:
            return self.model.length
        if self.train is not None:
            return self.train.sequence
        return self.model.context if self.has_model else None


__all__ = [
    "Activated",
    "Adapt",
    "Attention",
    "AttentionRouter",
    "Base",
    "BatchPriority",
    "Classes",
    "Cluster",
    "ClusterText",
    "Conv",
    "DSelectK",
    "DType",
    "Dense",
    "Device",
    "DeviceLoss",
    "DeviceRates",
    "Dropless",
    "Dynamic",
    "ExpertChoice",
    "Experts",
    "Factor",
    "FeedForward",
    "Form",
    "GShard",
    "GShardLoss",
    "Gate",
    "GateBound",
    "Gqa",
    "Greedy",
    "Hash",
    "ImportanceLoss",
    "KeptPart",
    "Layer",
    "LayerModule",
    "LayerNorm",
    "LayerRange",
    "Level",
    "LevelRates",
    "Linear",
    "LinearMap",
    "Llama3",
    "LoadLoss",
    "LoadUse",
    "LongRope",
    "Lora",
    "Measured",
    "Mha",
    "Mixture",
    "Mla",
    "Moa",
    "Model",
    "ModelPart",
    "Moe",
    "Node",
    "NoisyTopK",
    "Ntk",
    "Online",
    "Optimizer",
    "Parallel",
    "ParallelLayers",
    "Patches",
    "Peak",
    "Reference",
    "Replicate",
    "RmsNorm",
    "Rope",
    "SequenceLoss",
    "Shadow",
    "Smear",
    "Soft",
    "SparseMixer",
    "Spec",
    "Subject",
    "Switch",
    "SwitchLoss",
    "TokenEmbedding",
    "TopK",
    "Topology",
    "Trace",
    "Train",
    "Uniform",
    "Unit",
    "Update",
    "Windows",
    "Yarn",
    "ZLoss",
    "Zipf",
    "distinct_layers",
]
