"""`train { … }` and `parallel { … }`: how the model is trained, and over which degrees."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moec.grammar.spec.base import Form, Node
from moec.grammar.spec.model import PositiveInt


class AdamW(Node):
    """AdamW (Loshchilov & Hutter 2019)."""

    word: ClassVar[str] = "adamw"
    lr: Annotated[float, Field(gt=0, description="learning rate")] = 3e-4
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the first moment")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the second moment")] = 0.95
    eps: Annotated[float, Field(gt=0, description="added to the root of the second moment")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="decoupled; norms are not decayed")] = 0.1


class Uniform(Node):
    """Every expert gets the same load."""

    word: ClassVar[str] = "uniform"


class Zipf(Node):
    """Expert loads fall as rank ** -s."""

    word: ClassVar[str] = "zipf"
    positional: ClassVar[tuple[str, ...]] = ("s",)
    s: Annotated[float, Field(ge=0, description="exponent; 0 is uniform")]


class Train(Node):
    """`train { … }`."""

    word: ClassVar[str] = "train"
    form: ClassVar[Form] = "block"
    batch: Annotated[PositiveInt, Field(description="sequences per optimizer step, over all ranks")]
    sequence: Annotated[PositiveInt, Field(description="tokens per sequence")]
    optimizer: Annotated[AdamW, Field(description="update rule")] = AdamW()
    master: Annotated[Literal["fp32"], Field(description="dtype of master weights where the model's is narrower")] = (
        "fp32"
    )
    routing: Annotated[Uniform | Zipf, Field(description="the expert load to plan for")] = Uniform()


class Parallel(Node):
    """`parallel { … }`: degrees. What is left out is filled in by the `place` pass."""

    word: ClassVar[str] = "parallel"
    form: ClassVar[Form] = "block"
    dp: Annotated[PositiveInt | None, Field(description="data parallel; must equal ranks / (pp * tp * cp)")] = None
    ep: Annotated[PositiveInt | None, Field(description="expert parallel; divides ranks and every layer's experts")] = (
        None
    )
