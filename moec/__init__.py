"""moec: the compiler for Mixture-of-Experts models.

    plan = moec.compile("mixtral.moe")       # or text, or a Spec; `experts = 16` overrides a `let`
    moec.verify(plan)                        # the plan against the unsharded model
    with moec.launch(plan) as job: ...       # one rank, under torchrun
    moec.layer("ffn.moe")                    # one mixture, for a model of your own
    moec.latest("checkpoints")               # the last complete checkpoint in a folder
    moec.from_hf("Mixtral-8x7B-v0.1")        # the Spec of a model of Hugging Face; moec.load_hf has its weights

Everything here is imported when it is first used: `import moec` is cheap, and what needs no torch never imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moec.codegen.plan import Plan
    from moec.driver import compile, from_hf, launch, layer, load, load_for, reference, verify
    from moec.grammar.diagnostics import Diagnostic, DiagnosticError
    from moec.grammar.spec import Spec
    from moec.runtime.checkpoint.folders import latest
    from moec.runtime.errors import JobError
    from moec.runtime.host.hosted import clip_grad_norm_, end_step, expert_parameters
    from moec.runtime.host.layer import MoeLayer
    from moec.runtime.huggingface.load import load_hf
    from moec.runtime.huggingface.save import save_hf
    from moec.runtime.job.job import Job
    from moec.runtime.verify.verify_report import Report

__version__ = "0.1.0"

_HOMES = {
    "Diagnostic": "moec.grammar.diagnostics",
    "DiagnosticError": "moec.grammar.diagnostics",
    "Job": "moec.runtime.job.job",
    "JobError": "moec.runtime.errors",
    "MoeLayer": "moec.runtime.host.layer",
    "Plan": "moec.codegen.plan",
    "Report": "moec.runtime.verify.verify_report",
    "Spec": "moec.grammar.spec",
    "clip_grad_norm_": "moec.runtime.host.hosted",
    "compile": "moec.driver",
    "end_step": "moec.runtime.host.hosted",
    "expert_parameters": "moec.runtime.host.hosted",
    "from_hf": "moec.driver",
    "latest": "moec.runtime.checkpoint.folders",
    "launch": "moec.driver",
    "layer": "moec.driver",
    "load": "moec.driver",
    "load_for": "moec.driver",
    "load_hf": "moec.runtime.huggingface.load",
    "reference": "moec.driver",
    "save_hf": "moec.runtime.huggingface.save",
    "verify": "moec.driver",
}

__all__ = [
    "Diagnostic",
    "DiagnosticError",
    "Job",
    "JobError",
    "MoeLayer",
    "Plan",
    "Report",
    "Spec",
    "clip_grad_norm_",
    "compile",
    "end_step",
    "expert_parameters",
    "from_hf",
    "latest",
    "launch",
    "layer",
    "load",
    "load_for",
    "load_hf",
    "reference",
    "save_hf",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name.startswith("_"):  # Python and tools ask for these
        raise AttributeError(f"module 'moec' has no attribute {name!r}")
    from moec.subject import no_function

    raise no_function(name, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
