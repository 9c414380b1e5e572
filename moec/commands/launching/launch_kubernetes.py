"""`moec launch --k8s`: a manifest for the PyTorchJob of Kubeflow's Trainer v1 (`kubeflow.org/v1`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from moec.codegen.launch_command import torchrun_command
from moec.commands.launching.launch import Launch

FAILURES = 3
"""Restarts of a job. The operator adds up the restarts of all pods, and all pods fail together."""
PLACEHOLDER = "YOUR-IMAGE"
"""An invalid image name, because it has capitals: Kubernetes refuses it until the user replaces it."""
GPUS = {"cuda": "nvidia.com/gpu", "hip": "amd.com/gpu"}
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
UNPRINTED = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that JSON does not escape, and that YAML does not allow or reads as the end of a line."""
WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
"""Words that YAML 1.1 reads as something else than a string."""


def manifest(launch: Launch) -> dict[str, Any]:
    """The manifest as data. One pod per node, of all its GPUs; the first is the Master, where ranks meet."""
    ranks = launch.hosts.processes_per_node
    replicas = {"Master": {"replicas": 1, "restartPolicy": "OnFailure", "template": _pod(launch)}}
    if launch.hosts.nodes > 1:
        replicas["Worker"] = replicas["Master"] | {"replicas": launch.hosts.nodes - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": launch.name},
        "spec": {
            "nprocPerNode": str(ranks),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": FAILURES * launch.hosts.nodes},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _pod(launch: Launch) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for this name
        "image": launch.image or PLACEHOLDER,
        "command": _command(launch),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    resource = GPUS.get(launch.plan.spec.cluster.device.kind)
    if resource:
        container["resources"] = {"limits": {resource: launch.hosts.processes_per_node}}
    # The default /dev/shm of 64 MB is too small for NCCL and for data loaders.
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {"spec": {"containers": [container], "volumes": volumes}}


def _command(launch: Launch) -> list[str]:
    """The torchrun command. The operator sets the variables of `host` and `port`, and Kubernetes expands them."""
    script = [word.replace("$", "$$") for word in launch.script]
    port: int | str = "$(MASTER_PORT)" if launch.port is None else launch.port
    host, options = "$(MASTER_ADDR)", launch.restarts
    return torchrun_command(launch.plan, script, hosts=launch.hosts, host=host, port=port, options=options)


def kubernetes_text(launch: Launch) -> str:
    """The manifest as YAML."""
    head = [f"# {launch.sizes} for {_quoted(str(launch.path))}. Start it with `kubectl apply -f`."]
    head.append("# The image needs torch, moec, the plan and the script, each where the command expects it.")
    if launch.image is None:
        head.append(f"# Replace {PLACEHOLDER}, or give `--image`.")
    return "\n".join([*head, *_lines(manifest(launch)), ""])


def _lines(value: Any) -> Iterator[str]:
    """A non-empty dict or list in block style."""
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in items:
        head = "-" if key is None else f"{_scalar(key)}:"
        if not isinstance(item, dict | list):
            yield f"{head} {_scalar(item)}"
            continue
        inner = list(_lines(item))
        if key is None:
            yield f"- {inner[0]}"
            inner = inner[1:]
        else:
            yield head
        yield from (f"  {line}" for line in inner)


def _scalar(value: str | int) -> str:
    """A scalar: strings in quotes unless they are plain; JSON's quoting is YAML's."""
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    """A string in double quotes. Characters beyond 16 bits stay as they are, as YAML has no surrogate pairs."""
    return UNPRINTED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))
