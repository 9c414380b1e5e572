"""The ranks of a cluster that are processes of one machine, which launchers count as nodes and processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moec.grammar.spec import Cluster

MACHINES = ("node", "host", "machine", "server", "tray", "box")
"""Names of the level that joins the devices of one machine."""
WIDER = ("rack", "rail", "pod", "row", "cabinet", "superpod", "spine", "zone")
"""Names of levels that join machines: as the innermost one, such a level says nothing of machines."""
TRAYS = {"gb200": 4, "gb300": 4}
"""GPUs of one machine, where a level that joins machines is the innermost: an NVL72 rack has 18 trays of 4 GPUs."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """`nodes` machines of `processes_per_node` ranks each; `is_stated` is false where nothing says what one is."""

    nodes: int
    processes_per_node: int
    is_stated: bool = True


def hosts_of(cluster: Cluster) -> Hosts:
    """The machines of a cluster.

    A machine is what a level with a name of `MACHINES` joins, else what the innermost level joins. If that is a rack,
    the device says how many are in a machine, as of GB200 NVL72.
    """
    sizes = [level.size for level in cluster.levels] or [1]
    names = [level.name.lower() for level in cluster.levels] or [""]
    named = next((index for index, name in enumerate(names) if name in MACHINES), None)
    if named is not None:
        return _of(cluster, math.prod(sizes[: named + 1]))
    if names[0] not in WIDER:
        return _of(cluster, sizes[0])
    tray = TRAYS.get(cluster.device.name.lower())
    if tray is None:
        return _of(cluster, sizes[0], is_stated=math.prod(sizes) == 1)
    return _of(cluster, math.gcd(tray, sizes[0]))


def _of(cluster: Cluster, processes: int, is_stated: bool = True) -> Hosts:
    return Hosts(cluster.ranks // processes, processes, is_stated)
