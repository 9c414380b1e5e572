"""Prints the result of `moec launch`."""

from __future__ import annotations

from moec.commands.console.output import emit
from moec.commands.launching.launch import Launch, to_document, torchrun_lines
from moec.commands.launching.launch_kubernetes import kubernetes_text
from moec.commands.launching.launch_slurm import slurm_script


def print_launch(launch: Launch, way: str, style: str) -> None:
    """Prints the launch by `way`: torchrun, slurm or k8s. With `style` json, one document."""
    slurm = slurm_script(launch) if way == "slurm" else None
    k8s = kubernetes_text(launch) if way == "k8s" else None
    text = slurm or k8s
    lines = text.removesuffix("\n").split("\n") if text else torchrun_lines(launch)
    emit(style, lambda: lines, lambda: to_document(launch, slurm, k8s))
