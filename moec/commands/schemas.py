"""The JSON documents of all commands, and their JSON Schemas (docs/schemas)."""

from __future__ import annotations

from importlib import import_module
from types import GenericAlias
from typing import Any

DOCUMENTS = {
    "diagnostics": "list moec.commands.documents:DiagnosticDocument",
    "version": "moec.commands.documents:VersionDocument",
    "explain": "moec.commands.explain:Explanation",
    "verify": "moec.commands.verify_document:VerifyDocument",
    "fmt": "list moec.commands.documents:FormattedFile",
    "init": "moec.commands.documents:WrittenFile",
    "init-list": "list moec.commands.documents:ListedModel",
    "import-hf": "moec.commands.documents:WrittenFile",
    "compile": "moec.commands.compile_document:CompiledPlan",
    "compile-emit": "moec.commands.compile_document:EmittedStage",
    "inspect-file": "list moec.commands.documents:InspectedValue",
    "inspect-plan": "moec.commands.inspect_plan_document:PlanDocument",
    "inspect-rank": "moec.commands.inspect_plan_document:RankDocument",
    "inspect-text": "moec.commands.documents:InspectedText",
    "inspect-params": "moec.commands.inspect_documents:ParametersDocument",
    "inspect-memory": "moec.commands.inspect_documents:MemoryDocument",
    "inspect-kernels": "moec.commands.inspect_documents:KernelsDocument",
    "load": "moec.commands.documents:LoadedPlan",
    "tune": "moec.commands.tune:TunedPlan",
    "launch": "moec.commands.launch:LaunchDocument",
    "doctor": "moec.commands.doctor:DoctorDocument",
    "checkpoint-inspect": "moec.commands.checkpoint_document:CheckpointDocument",
    "checkpoint-inspect-folder": "moec.commands.checkpoint_document:CheckpointsDocument",
    "checkpoint-verify": "moec.commands.checkpoint_document:DigestsDocument",
    "checkpoint-convert": "moec.commands.documents:WrittenWeights",
    "weights-import": "moec.commands.documents:WrittenWeights",
    "weights-export": "moec.commands.documents:WrittenWeights",
    "weights-upcycle": "moec.commands.documents:WrittenWeights",
}
"""Name of a schema: the type of its document, `list` before it for a list of such documents."""


def type_of(name: str) -> Any:
    """The type of the document `name`, as pydantic takes it."""
    words = DOCUMENTS[name].split()
    module, _, attribute = words[-1].partition(":")
    found = getattr(import_module(module), attribute)
    return GenericAlias(list, (found,)) if words[0] == "list" else found


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of the document `name`."""
    from pydantic import TypeAdapter

    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | TypeAdapter(type_of(name)).json_schema()
