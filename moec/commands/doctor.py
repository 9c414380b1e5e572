"""`moec doctor`: the machine's devices and packages, the ones that moec would use, and those that are missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from moec import __version__
from moec.commands.console.output import document, emit
from moec.commands.console.terminal import failure, success
from moec.commands.console.version import installed
from moec.commands.doctor_checks import (
    Finding,
    State,
    finding,
    installation,
    machine,
    network,
    packages,
    variables,
    versions,
)


@document
class DoctorDocument:
    """What was found. `ok` is false where training cannot work here."""

    ok: bool
    device: str | None
    """Where ranks would run: cuda or cpu; null without torch."""
    backend: str | None
    """The backend that operators would use."""
    findings: list[Finding]


def run(style: str) -> int:
    """Prints the findings; returns 1 where one of them is wrong, else 0."""
    findings = [*versions(), *installation()]
    device, backend, torch_findings = None, None, list[Finding]()
    if installed("torch") is not None:
        device, backend, torch_findings = _torch()
    findings += [*torch_findings, *machine(), *network(), *variables(), *packages()]
    report = DoctorDocument(
        ok=all(entry.state != "wrong" for entry in findings), device=device, backend=backend, findings=findings
    )
    emit(style, lambda: _lines(report), lambda: report)
    return 0 if report.ok else 1


def _torch() -> tuple[str | None, str | None, list[Finding]]:
    """The device and backend that moec would use, and torch's findings."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        help = "the installation is broken: `pip install --force-reinstall torch`"
        return None, None, [finding("import torch", "wrong", str(error).splitlines()[0], help)]
    gpus = torch.cuda.device_count()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    findings = list(_gpus(gpus, torch.version.cuda, torch.version.hip))
    has = dist.is_available()
    for name, is_there in (("gloo", has and dist.is_gloo_available()), ("nccl", has and dist.is_nccl_available())):
        is_needed = name == "gloo" or device == "cuda"
        help = "ranks communicate by it: install a torch that was built with it" if is_needed and not is_there else ""
        state: State = "ok" if is_there else "wrong" if is_needed else "note"
        findings.append(finding(name, state, "available" if is_there else "not in this torch", help))
    backend, backend_findings = _backend(device)
    return device, backend, [*findings, *backend_findings]


def _gpus(gpus: int, cuda: str | None, hip: str | None) -> Iterator[Finding]:
    import torch

    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    driver = next((tool for tool in ("nvidia-smi", "rocm-smi") if shutil.which(tool)), None)
    yield finding("torch is built for", "ok", built)
    if gpus:
        names = {torch.cuda.get_device_name(index) for index in range(gpus)}
        yield finding("GPUs", "ok", f"{gpus} × {', '.join(sorted(names))}")
    elif driver and not (cuda or hip):
        help = "training runs on the CPU: install the torch of your CUDA or ROCm from pytorch.org"
        yield finding("GPUs", "note", f"{driver} is here, but this torch has no GPU support", help)
    elif driver or cuda or hip:
        help = "training runs on the CPU: look at the driver and at CUDA_VISIBLE_DEVICES"
        yield finding("GPUs", "note", "torch finds none", help)
    else:
        yield finding("GPUs", "ok", "none; training runs on the CPU")


def _backend(device: str) -> tuple[str | None, list[Finding]]:
    """The backend of `device`, and findings that prevent its use."""
    from moec.runtime.backends import BackendError, forced_backend, require_known
    from moec.runtime.backends.triton.triton_support import complaint

    forced = forced_backend()
    try:
        require_known(forced)
    except BackendError as error:
        return None, [finding("backend", "wrong", error.diagnostics[0].message, error.diagnostics[0].help)]
    if forced == "torch" or (forced is None and device == "cpu"):
        reason = "MOEC_BACKEND is `torch`" if forced else "there is no GPU"
        return "torch", [finding("backend", "ok", f"plain torch: {reason}")]
    unfit = complaint(device)
    if unfit and forced:
        return None, [finding("backend", "wrong", f"MOEC_BACKEND={forced}: {unfit}", "unset MOEC_BACKEND")]
    if unfit:
        return "torch", [
            finding("backend", "note", f"plain torch: {unfit}", "training works, slowly, until it is fixed")
        ]
    findings = [finding("backend", "ok", f"{forced or 'triton'} kernels")]
    if not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
        findings.append(
            finding("C compiler", "wrong", "none", "Triton builds its launchers with one: install gcc, or set CC")
        )
    return forced or "triton", findings


def _lines(report: DoctorDocument) -> Iterator[str]:
    yield f"moec {__version__}"
    yield ""
    width = max(len(entry.name) for entry in report.findings)
    for entry in report.findings:
        mark = {"ok": " ", "note": "·", "wrong": "✗"}[entry.state]
        yield f"{mark} {entry.name:{width}}  {entry.found}"
        if entry.help:
            yield f"  {'':{width}}  → {entry.help}"
    yield ""
    if any(entry.state == "note" for entry in report.findings):
        yield "· a note: training works on this machine as it is"
    place = f"on {'GPUs' if report.device == 'cuda' else 'the CPU'}, with {report.backend} operators"
    wrong = [entry.name for entry in report.findings if entry.state == "wrong"]
    broken = f"training cannot work here; fix: {', '.join(wrong)}"
    yield success(f"training works here, {place}") if report.ok else failure(broken)
