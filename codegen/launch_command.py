"""The `torchrun` command that starts a plan's ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from moec.codegen.plan import Plan
from moec.passes.place.hosts import Hosts, hosts_of

PORT = 29500
"""The port of the rendezvous on the first node: torchrun's own default."""
HOST = "$HOST"
"""A variable of the shell, in place of the address of the first node where that is not known yet."""
_VARIABLES = re.compile(r"([\w./:-]|\$\{?\w+\}?)*")


class Expanded(str):
    """A word with variables that the shell expands, such as `$HOST:29500`."""

    __slots__ = ()


def torchrun_command(
    plan: Plan,
    script: Sequence[str] = ("train.py",),
    *,
    hosts: Hosts | None = None,
    host: str = HOST,
    port: int | str = PORT,
    options: Sequence[str] = (),
    standalone: bool | None = None,
) -> list[str]:
    """The words of the command: the same on every node, `script` with its arguments last.

    `hosts`: other nodes than those of the plan's cluster. `host` and `port` may be variables that a shell or Kubernetes
    expands. `options`: further ones of torchrun, before the script.
    On one node the rendezvous takes a free port (`--standalone`), so that two jobs do not share one. `standalone`
    overrides this: Slurm gives each job a port of its own.
    """
    hosts = hosts or hosts_of(plan.spec.cluster)
    processes = str(hosts.processes_per_node)
    if hosts.nodes == 1 if standalone is None else standalone:
        rendezvous = ["--standalone", "--nproc-per-node", processes]
    else:
        rendezvous = ["--nnodes", str(hosts.nodes), "--nproc-per-node", processes]
        rendezvous += ["--rdzv-backend", "c10d", "--rdzv-endpoint", Expanded(f"{host}:{port}")]
    return ["torchrun", *rendezvous, *options, *script]


def shell_text(words: Sequence[str]) -> str:
    """A command as a POSIX shell reads it. Only variables in `Expanded` words are expanded, never commands."""
    return " ".join(
        f'"{word}"' if isinstance(word, Expanded) and "$" in word and _VARIABLES.fullmatch(word) else shlex.quote(word)
        for word in words
    )


def start_command(plan: Plan, path: Path | str, script: Sequence[str] = ("train.py",)) -> str:
    """The command that starts the plan in `path` with `script`, a script and its arguments.

    It is torchrun, or `moec launch` where the number of ranks of a node is not stated: the user replaces `N`.
    """
    if hosts_of(plan.spec.cluster).is_stated:
        return shell_text(torchrun_command(plan, script))
    return shell_text(["moec", "launch", str(path), "--per-node", "N", *script])
