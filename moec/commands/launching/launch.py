"""`moec launch`: prints how to start a plan's ranks by torchrun, Slurm or Kubernetes. `--run` starts them here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moec.codegen.launch_command import HOST, PORT, shell_text, torchrun_command
from moec.codegen.plan import Plan
from moec.commands.console.output import document
from moec.grammar.amounts import count
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.passes.place.hosts import Hosts, hosts_of

LONGEST_NAME = 40
"""Kubernetes allows names of 63 characters, and its operator appends `-worker-999`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One way to start a plan. `script`: its path and arguments. `port` None: the launcher chooses it."""

    plan: Plan
    path: Path
    script: tuple[str, ...]
    hosts: Hosts
    name: str
    host: str = HOST
    port: int | None = None
    max_restarts: int = 0
    image: str | None = None

    @property
    def restarts(self) -> list[str]:
        """torchrun's option for restarts, if there are any."""
        return ["--max-restarts", str(self.max_restarts)] if self.max_restarts else []

    @property
    def argv(self) -> list[str]:
        """The words of the torchrun command."""
        port = PORT if self.port is None else self.port
        options = self.restarts
        return torchrun_command(self.plan, self.script, hosts=self.hosts, host=self.host, port=port, options=options)

    @property
    def sizes(self) -> str:
        """`4 nodes × 8 ranks`."""
        return f"{count(self.hosts.nodes, 'node')} × {count(self.hosts.processes_per_node, 'rank')}"


@document
class LaunchDocument:
    """How a plan's ranks are started."""

    nodes: int
    processes_per_node: int
    argv: list[str]
    """The words of the torchrun command without a scheduler, the same on every node; `slurm` and `k8s` have another."""
    environment: dict[str, str]
    """The variables that the words of `argv` name, with what each has to be."""
    slurm: str | None
    """With --slurm: the batch script."""
    k8s: str | None
    """With --k8s: the manifest, as YAML."""


def make_launch(
    plan: Plan,
    path: Path,
    script: Sequence[str],
    *,
    nodes: int | None = None,
    per_node: int | None = None,
    host: str | None = None,
    port: int | None = None,
    max_restarts: int = 0,
    name: str | None = None,
    image: str | None = None,
) -> Launch:
    """The launch of `plan`, read from `path`. Raises `DiagnosticError` MOE0917 for nodes that do not make its ranks."""
    return Launch(
        plan=plan,
        path=path,
        script=tuple(script) or ("train.py",),
        hosts=_hosts(plan, nodes, per_node),
        name=label(name or plan.name),
        host=host or HOST,
        port=port,
        max_restarts=max_restarts,
        image=image,
    )


def _hosts(plan: Plan, nodes: int | None, per_node: int | None) -> Hosts:
    """The nodes that are stated, checked against the plan's ranks; else those of its cluster."""
    ranks, cluster_hosts = plan.world_size, hosts_of(plan.spec.cluster)
    if nodes is None and per_node is None:
        if cluster_hosts.is_stated:
            return cluster_hosts
        level = plan.spec.cluster.levels[0].name
        raise _refused(
            f"the innermost level of cluster {plan.spec.cluster.name} is {level!r}, and nothing says how many of its "
            f"{ranks} ranks are in one node",
            'give `--per-node`, or put a `level "node"` inside',
        )
    stated = nodes if nodes is not None else per_node
    assert stated is not None
    if ranks % stated or (nodes is not None and per_node is not None and nodes * per_node != ranks):
        node_count = [count(nodes, "node")] if nodes is not None else []
        rank_count = [f"{per_node} per node"] if per_node is not None else []
        message = f"the plan is for {count(ranks, 'rank')}, not for {' × '.join([*node_count, *rank_count])}"
        fits = max(size for size in range(1, min(stated, ranks) + 1) if ranks % size == 0)
        option = f"--nodes {fits}" if nodes is not None else f"--per-node {fits}"
        default = (
            f"without the option it is {cluster_hosts.nodes} × {cluster_hosts.processes_per_node}; "
            if cluster_hosts.is_stated
            else ""
        )
        help = f"{default}`{option}` alone fits" + " too" * cluster_hosts.is_stated
        raise _refused(message, help)
    number = nodes if nodes is not None else ranks // stated
    return Hosts(number, ranks // number)


def _refused(message: str, help: str) -> DiagnosticError:
    return DiagnosticError([diagnose("MOE0917", None, message, help=help)])


def label(name: str) -> str:
    """`name` as a label of RFC 1123, which Kubernetes requires: lower-case letters, digits and inner dashes."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:LONGEST_NAME].strip("-")
    return plain if plain[:1].isalpha() else f"moec-{plain}".strip("-")


def torchrun_lines(launch: Launch) -> list[str]:
    """The command for a shell, with a comment where it is not complete."""
    lines = []
    if launch.hosts.nodes > 1:
        lines.append(f"# {launch.sizes}: run this on every node" + _host_comment(launch))
    return [*lines, shell_text(launch.argv)]


def _host_comment(launch: Launch) -> str:
    return ", with HOST set to the first node's name or address" if launch.host == HOST else ""


def to_document(launch: Launch, slurm: str | None, k8s: str | None) -> LaunchDocument:
    """The JSON document of a launch."""
    return LaunchDocument(
        nodes=launch.hosts.nodes,
        processes_per_node=launch.hosts.processes_per_node,
        argv=launch.argv,
        environment=environment(launch),
        slurm=slurm,
        k8s=k8s,
    )


def environment(launch: Launch) -> dict[str, str]:
    """The variables that the command reads, each with a description of its value."""
    needs_host = launch.hosts.nodes > 1 and launch.host == HOST
    return {"HOST": "the first node's name or address"} if needs_host else {}
