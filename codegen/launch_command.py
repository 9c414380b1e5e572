"""The `torchrun` command that starts a plan's ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from moec.codegen.plan import Plan
from moec.passes.place.hosts import Hosts, hosts_of

PORT = 29500
"""The port of the rendezvous on the first node: torchrun's own default."""
HOST = "$HOST"
"""Stands for the address of the first node, where that is not known yet: a variable of the shell."""
ENDPOINT = "--rdzv-endpoint"
_VARIABLES = re.compile(r"[\w.-]*(\$\{?\w+\}?)?:(\d+|\$\{?\w+\}?)")


def torchrun_command(
    plan: Plan,
    script: Sequence[str] = ("train.py",),
    *,
    hosts: Hosts | None = None,
    host: str = HOST,
    port: int | str = PORT,
    options: Sequence[str] = (),
) -> list[str]:
    """The words of the command: the same on every node, `script` with its arguments last.

    `hosts`: other nodes than those of the plan's cluster. `host` and `port` may be variables that a shell or Kubernetes
    expands. `options`: further ones of torchrun, before the script.
    On one node the rendezvous takes a free port (`--standalone`), so that two jobs do not meet.
    """
    hosts = hosts or hosts_of(plan.spec.cluster)
    processes = str(hosts.processes_per_node)
    if hosts.nodes == 1:
        where = ["--standalone", "--nproc-per-node", processes]
    else:
        where = ["--nnodes", str(hosts.nodes), "--nproc-per-node", processes]
        where += ["--rdzv-backend", "c10d", ENDPOINT, f"{host}:{port}"]
    return ["torchrun", *where, *options, *script]


def shell_text(words: Sequence[str]) -> str:
    """A command as a POSIX shell reads it. Only an endpoint of variables, such as `$HOST:29500`, is expanded."""
    first = next((index for index, word in enumerate(words) if word == ENDPOINT), -2)
    return " ".join(
        f'"{word}"' if index == first + 1 and "$" in word and _VARIABLES.fullmatch(word) else shlex.quote(word)
        for index, word in enumerate(words)
    )
