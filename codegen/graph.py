"""FX graphs as data: what `stages/0.json` holds. Everything here is validated by its types; nothing is executed."""

from __future__ import annotations

import keyword
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_NODES = 100_000
"""Nodes in one graph. The largest that moec writes, `forward` of 10,000 layers (the language's limit), has 50,000."""

Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,99}$")]
DottedName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,99}(\.[a-z0-9][a-z0-9_]{0,99}){0,9}$")]
Label = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.\[\], ]{0,59999}$")]
"""Names of graphs, meshes and groups: `layers[4..31]`, `ep[1..23 step 2]`."""


class Data(BaseModel):
    """Frozen, strict, nothing beyond what is declared."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)


class Ref(Data):
    """An argument that is another node's result."""

    node: Identifier


class DTypeLiteral(Data):
    """An argument that is a dtype. `moec verify` reads every floating one as float64."""

    dtype: Literal["bf16", "fp16", "fp32", "fp64", "int64"]


Literals = bool | int | float | str | None
Arg = Ref | DTypeLiteral | Literals | tuple[int, ...]


class Node(Data):
    """One node of an FX graph.

    `target` is an operator of `operators.ALLOWED`, a parameter or submodule path, or an input's name; `graph` is the
    body that a `call_module` runs. `value`, `layout` and `ragged` are what the Program calls the result and how it lies
    on the mesh; `span` is the `.moe` line it serves. `evaluation` are the arguments in evaluation, where they differ.
    """

    name: Identifier
    op: Literal["placeholder", "get_attr", "call_function", "call_module", "output"]
    target: DottedName | Annotated[str, Field(pattern=r"^(aten|moec)\.[a-z_]+\.[A-Za-z_]+$")]
    args: tuple[Arg, ...] = ()
    kwargs: dict[Identifier, Arg] = {}
    evaluation: tuple[Arg, ...] | None = None
    graph: Label | None = None
    value: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_.]{0,99}$")
    layout: str | None = Field(default=None, pattern=r"^[a-z0-9_:() ]{0,200}$")
    ragged: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_.]{0,99}$")
    span: str | None = Field(default=None, max_length=1000)

    @model_validator(mode="after")
    def _no_keywords(self) -> Node:
        for part in (self.name, *self.target.split("."), *self.kwargs):
            if keyword.iskeyword(part):
                raise ValueError(f"{part!r} is a keyword")
        return self

    def refs(self) -> list[str]:
        """Names of the nodes that this one uses."""
        return [arg.node for arg in (*self.args, *self.kwargs.values()) if isinstance(arg, Ref)]


class Graph(Data):
    """One FX graph: a layer's body, its experts, the model's `forward`, or its `loss`."""

    name: Label
    nodes: Annotated[tuple[Node, ...], Field(min_length=1, max_length=MAX_NODES)]


MODEL_RESULT, LAYER_RESULT = "logits", "y"
"""What the forward graph of a model gives first, and that of a layer."""


class StageGraphs(Data):
    """The graphs that one pipeline stage runs: `stages/<index>.json`."""

    index: Annotated[int, Field(ge=0)]
    graphs: tuple[Graph, ...]

    def graph(self, name: str) -> Graph:
        """The graph called `name`. Raises KeyError."""
        return self.by_name()[name]

    def by_name(self) -> dict[str, Graph]:
        """The graphs by name. Not cached: `model_copy` would carry the cache over to a stage of other graphs."""
        return {graph.name: graph for graph in self.graphs}

    def in_evaluation(self) -> StageGraphs:
        """The graphs as they run in evaluation; the stage itself where nothing differs."""
        if not any(node.evaluation for graph in self.graphs for node in graph.nodes):
            return self
        return self.model_copy(update={"graphs": tuple(_in_evaluation(graph) for graph in self.graphs)})

    def to_json(self) -> dict[str, Any]:
        """What the file holds; defaults are left out."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _in_evaluation(graph: Graph) -> Graph:
    nodes = (
        node.model_copy(update={"args": node.evaluation, "evaluation": None}) if node.evaluation else node
        for node in graph.nodes
    )
    return graph.model_copy(update={"nodes": tuple(nodes)})
