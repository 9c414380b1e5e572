"""Ranks of a job without a launcher: processes forked from this one."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable


def forked_ranks(ranks: int, run: Callable[[int], object]) -> list[int]:
    """The processes of so many ranks. Each ends after `run(rank)`: with 0, or where that raises with 1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            try:
                run(rank)
            except BaseException:  # noqa: BLE001
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children
