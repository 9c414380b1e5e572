"""The JSON documents of all commands and `report.json` of a plan, and their JSON Schemas (docs/schemas)."""

from __future__ import annotations

from importlib import import_module
from types import GenericAlias
from typing import Any

DOCUMENTS = {
    "diagnostics": "list moec.commands.console.documents:DiagnosticDocument",
    "version": "moec.commands.console.documents:VersionDocument",
    "explain": "moec.commands.explain:Explanation",
    "verify": "moec.commands.verify_document:VerifyDocument",
    "fmt": "list moec.commands.console.documents:FormattedFile",
    "init": "moec.commands.console.documents:WrittenFile",
    "init-list": "list moec.commands.console.documents:ListedModel",
    "import-hf": "moec.commands.console.documents:WrittenFile",
    "compile": "moec.commands.compile_document:CompiledPlan",
    "compile-emit": "moec.commands.compile_document:EmittedStage",
    "plan": "moec.commands.planning.plan_document:StepPrediction",
    "plan-report": "moec.codegen.search_report:SearchReport",
    "inspect-file": "list moec.commands.console.documents:InspectedValue",
    "inspect-plan": "moec.commands.inspecting.inspect_plan_document:PlanDocument",
    "inspect-rank": "moec.commands.inspecting.inspect_plan_document:RankDocument",
    "inspect-text": "moec.commands.console.documents:InspectedText",
    "inspect-params": "moec.commands.inspecting.inspect_documents:ParametersDocument",
    "inspect-memory": "moec.commands.inspecting.inspect_documents:MemoryDocument",
    "inspect-kernels": "moec.commands.inspecting.inspect_documents:KernelsDocument",
    "load": "moec.commands.console.documents:LoadedPlan",
    "tune": "moec.commands.tune:TunedPlan",
    "launch": "moec.commands.launching.launch:LaunchDocument",
    "top": "moec.commands.top:RunDocument",
    "doctor": "moec.commands.doctor:DoctorDocument",
    "checkpoint-inspect": "moec.commands.checkpoints.checkpoint_document:CheckpointDocument",
    "checkpoint-inspect-folder": "moec.commands.checkpoints.checkpoint_document:CheckpointsDocument",
    "checkpoint-verify": "moec.commands.checkpoints.checkpoint_document:DigestsDocument",
    "checkpoint-convert": "moec.commands.console.documents:WrittenWeights",
    "weights-import": "moec.commands.console.documents:WrittenWeights",
    "weights-export": "moec.commands.console.documents:WrittenWeights",
    "weights-upcycle": "moec.commands.console.documents:WrittenWeights",
}
"""Name of a schema: the type of its document, `list` before it for a list of such documents."""


def type_of(name: str) -> Any:
    """The type of the document `name`, as pydantic takes it."""
    words = DOCUMENTS[name].split()
    module, _, attribute = words[-1].partition(":")
    document_type = getattr(import_module(module), attribute)
    return GenericAlias(list, (document_type,)) if words[0] == "list" else document_type


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of the document `name`."""
    from pydantic import TypeAdapter

    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | TypeAdapter(type_of(name)).json_schema()
