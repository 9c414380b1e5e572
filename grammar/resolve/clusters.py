"""Clusters and devices: `from`, `nodes`, and devices by name, declared or built in."""

from __future__ import annotations

from collections.abc import Callable

from moec.grammar.diagnostics.diagnostic import Label
from moec.grammar.resolve.parts import Part, Stated, build, merged
from moec.grammar.resolve.scope import BROKEN, Broken, Scope
from moec.grammar.schema import fields
from moec.grammar.spec import Cluster, ClusterText, Device
from moec.grammar.suggest import advice, meant

_BASE, _NODES, _DEVICE, _LEVEL = "from", "nodes", "device", "level"
assert {_BASE, _NODES, _DEVICE, _LEVEL} == set(fields(ClusterText))


class Machines:
    """The clusters and devices of all files read, by name in the order read.

    `built_in` gives a device of the library by its name; `shipped_devices` and `shipped_clusters` name what it has.
    """

    def __init__(
        self, built_in: Callable[[str], Part | None], shipped_devices: list[str], shipped_clusters: list[str]
    ) -> None:
        self.built_in, self.shipped_devices, self.shipped_clusters = built_in, shipped_devices, shipped_clusters
        self.clusters: dict[str, Part] = {}
        self.devices: dict[str, Part] = {}


def resolve_clusters(scope: Scope, machines: Machines) -> Cluster | Broken:
    """The last cluster, which is the one used. All clusters and devices are checked."""
    resolved: dict[str, Part | Broken] = {}
    cluster: Cluster | Broken = BROKEN
    for part in machines.devices.values():
        build(scope, part)
    for name in machines.clusters:
        cluster = _cluster(scope, machines, _applied(scope, machines, name, resolved))
    return cluster


def _applied(scope: Scope, machines: Machines, name: str, resolved: dict[str, Part | Broken]) -> Part | Broken:
    """Cluster `name` with its `from` and `nodes` applied; kept in `resolved`."""
    chain: list[Part] = []
    current: str | None = name
    while current is not None and current not in resolved:
        part = machines.clusters[current]
        if any(part is other for other in chain):
            _report_circle(scope, part, chain)
            resolved[name] = BROKEN
            return BROKEN
        chain.append(part)
        current = _base(scope, machines, part)
        if current is None and _BASE in part.stated:  # no such cluster: diagnosed
            resolved[name] = BROKEN
            return BROKEN
    base = resolved[current] if current is not None else None
    for part in reversed(chain):
        assert part.label
        applied: Part | Broken = BROKEN
        if not isinstance(base, Broken):
            applied = _multiplied(merged(base, part) if base else part)
        resolved[part.label.value] = base = applied
    return resolved[name]


def _base(scope: Scope, machines: Machines, part: Part) -> str | None:
    stated = part.stated.get(_BASE)
    if stated is None or not isinstance(stated.value, str):
        return None
    if stated.value in machines.clusters:
        return stated.value
    help = advice(stated.value, machines.clusters)
    if stated.value in machines.shipped_clusters:
        help = f'it is in the library: add `use "clusters/{stated.value}"`'
    instead = _written(meant(stated.value, machines.clusters))
    scope.error("MOE0201", stated.span, f"no cluster `{stated.value}` is declared", help=help, instead=instead)
    return None


def _written(name: str | None) -> str | None:
    """A block's name as a value."""
    return name if name is None or name.isidentifier() else f'"{name}"'


def _report_circle(scope: Scope, part: Part, chain: list[Part]) -> None:
    begin = next(index for index, other in enumerate(chain) if other is part)
    names = [other.label.value for other in chain[begin:] if other.label]
    stated = part.stated[_BASE]
    message = f"{' from '.join([*names, names[0]])}"
    labels = [Label(span=other.stated[_BASE].span, message="and here") for other in chain[begin + 1 :]]
    scope.error("MOE0216", stated.span, message, *labels)


def _multiplied(part: Part) -> Part:
    """`nodes` times the outermost level."""
    nodes, levels = part.stated.get(_NODES), part.blocks.get(_LEVEL, [])
    stated = {word: value for word, value in part.stated.items() if word not in (_NODES, _BASE)}
    if nodes and levels:
        *inner, outermost = levels
        size = outermost.stated.get("size")
        if size:
            counts = isinstance(nodes.value, int) and isinstance(size.value, int)
            value = nodes.value * size.value if counts else BROKEN  # type: ignore[operator]
            larger = {**outermost.stated, "size": Stated(value, nodes.span, nodes.name)}
            levels = [*inner, outermost._replace(stated=larger)]
    return part._replace(stated=stated, blocks={**part.blocks, _LEVEL: levels})


def _cluster(scope: Scope, machines: Machines, part: Part | Broken) -> Cluster | Broken:
    if isinstance(part, Broken):
        return BROKEN
    text = build(scope, part)
    device = part.stated.get(_DEVICE)
    lacks = [] if device else [f"`{_DEVICE}`"]
    lacks += [] if part.blocks.get(_LEVEL) else [f"`{_LEVEL}`"]
    if lacks and not scope.moved.issuperset(word.strip("`") for word in lacks) and not part.incomplete:
        help = (
            'for example `device = h100; level "gpu" { size = 8 }`, or `from = dgx_h100` with `use "clusters/dgx_h100"`'
        )
        scope.error("MOE0203", part.span, f"`cluster` needs {' and '.join(lacks)}", help=help)
    made = _device(scope, machines, device) if device else BROKEN
    if isinstance(made, Broken) or lacks or not isinstance(text, ClusterText):
        return BROKEN
    spans = {word: span for word in ("", "name", "device", "levels") if (span := text.span(word))}
    return Cluster.checked({"name": text.name, "device": made, "levels": text.levels}, spans)


def _device(scope: Scope, machines: Machines, stated: Stated) -> Device | Broken:
    if not isinstance(stated.value, str):
        return BROKEN
    part = machines.devices.get(stated.value) or machines.built_in(stated.value)
    if part is None:
        allowed = [*machines.devices, *machines.shipped_devices]
        help = advice(stated.value, allowed)
        instead = _written(meant(stated.value, allowed))
        return scope.error("MOE0201", stated.span, f"no device `{stated.value}` is known", help=help, instead=instead)
    device = build(scope, part)
    return device if isinstance(device, Device) else BROKEN
