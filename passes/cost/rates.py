"""Turns costs into seconds: the interface of a cluster's rates, and rates read from the words of a `.moe` file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from moec.grammar.spec.cluster import Cluster, Device, Level
from moec.passes.cost.exchange import Exchange, Link, exchange_seconds
from moec.passes.cost.groups import Group, parts_of_group
from moec.passes.ir.work.arrays import larger
from moec.passes.ir.work.cost import Choices, Collective, Product

FLOPS_PER_BYTE = 10.0
"""FLOPs of a device that states no peak, per byte of its memory's traffic. A guess: that of the library's `cpu`."""

NARROW_OVER_FP32 = 16.0
"""The peak in a narrow dtype over that in fp32 where a device states only the former: A100 to B200 without TF32
(NVIDIA's data sheets: 312 over 19.5 TFLOP/s, 989 over 67, 2,250 over 75)."""

NETWORK_SHARE = 0.25
"""Bandwidth of a level that states none, as a share of the device's memory's. A guess: a message is copied twice."""

LATENCIES = (1.4e-6, 5e-6)
"""Seconds of a message inside of the innermost level, and over others, where a level states none: that of the library's
`dgx_h100`."""

SHARED_RING = 0.7
"""What rings reach where several ranks of a group are in one unit and leave it over their own links, as a share of what
one does: fitted to the fourteen published layouts of arXiv 2504.14960, tables 3 and 4."""

ADAMW_BYTES = 40.0
"""Bytes that AdamW with clipping reads and writes for a parameter, each tensor once a kernel: the gradient for the
norm, to scale it and for the update, the parameter and two states, all in fp32."""

COPIES_OF_2DH = 4
"""How often a hierarchical exchange reads or writes all rows to sort them between two levels."""

Contents = Literal["values", "weights", "gradients"]
"""What a collective sends: values between ops and their gradients, weights, gradients of weights."""


class Rates(Protocol):
    """The seconds that one rank needs for a part of a cost."""

    def product(self, product: Product, *, backward: bool) -> float:
        """Of a product on the device."""
        ...

    def moved(self, size: float) -> float:
        """Of `size` bytes that kernels without products read and write."""
        ...

    def moved_again(self, size: float) -> float:
        """Of `size` bytes that only several kernels in the place of one move (`Direction.again`)."""
        ...

    def copied(self, size: float) -> float:
        """Of `size` bytes that kernels read and write to cast weights, and to widen and add gradients."""
        ...

    def launched(self, kernels: float) -> float:
        """Of the host, to launch so many kernels."""
        ...

    def updated(self, size: float) -> float:
        """Of an optimizer's step with clipping that reads and writes `size` bytes."""
        ...

    def collective(
        self, collective: Collective, sent: float, group: Group, choices: Choices | None = None, of: Contents = "values"
    ) -> float:
        """Of a collective in which the rank sends `sent` bytes `of` values, weights or gradients of weights."""
        ...

    def message(self, size: float, crossed: Level | None) -> float:
        """Of `size` bytes from rank to rank over the outermost level that they cross; None if they cross none."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterRates:
    """The rates that a file states: peaks, bandwidths, and the shares of them that `achieved` gives.

    A grouped product takes as long as if each expert had `half_rows` more rows: with r rows it reaches r / (r +
    `half_rows`) of a large product's rate. A ring over several levels is bound by the slowest. `exchange`: how rows are
    sent, by default as moec's jobs send them. On CPUs experts have no tiles to fill, and launches take no time.
    """

    cluster: Cluster
    exchange: Exchange = field(default=Exchange(), kw_only=True)

    def product(self, product: Product, *, backward: bool) -> float:
        device, rates = self.cluster.device, self.cluster.device.rates
        if product.kind == "attention":
            share = rates.attention_backward if backward else rates.attention
            return product.flops / (share * peak(device, product.dtype))
        has_tiles = product.kind == "grouped" and device.kind != "cpu"
        more_rows = rates.half_rows * product.groups if has_tiles else 0.0
        flops = 2 * (product.m + more_rows) * product.n * product.k
        return larger(flops / (rates.products * peak(device, product.dtype)), self.moved(product.moved))

    def moved(self, size: float) -> float:
        device = self.cluster.device
        return size / (device.rates.memory * device.bandwidth)

    def moved_again(self, size: float) -> float:
        return self.moved(size)

    def copied(self, size: float) -> float:
        return self.moved(size)

    def launched(self, kernels: float) -> float:
        return kernels * self.cluster.device.rates.launch if self.cluster.device.kind != "cpu" else 0.0

    def updated(self, size: float) -> float:
        device = self.cluster.device
        return size / ADAMW_BYTES * device.rates.optimizer / device.bandwidth

    def collective(
        self, collective: Collective, sent: float, group: Group, choices: Choices | None = None, of: Contents = "values"
    ) -> float:
        parts = parts_of_group(group, self.cluster)
        whole = sent * group.ranks / larger(group.ranks - 1, 1)
        if collective == "all_to_all":
            links = [
                Link(*part, level.rates.all_to_all * self.bandwidth(level), self.latency(number))
                for number, (part, level) in enumerate(zip(parts, self.cluster.levels, strict=True))
            ]
            copying = self.moved(COPIES_OF_2DH * whole)
            return exchange_seconds(self.exchange, whole, group.ranks, links, choices, copying)
        seconds = 0.0
        for number, (inside, units) in enumerate(parts):
            level, rings = self.cluster.levels[number], inside * (1 - (1 - SHARED_RING) * (inside > 1))
            peers = (units - 1) * (2 if collective == "all_reduce" else 1)
            over = whole * (units - 1) / units / (rings * level.rates.ring * self.bandwidth(level))
            seconds = larger(seconds, (over + self.latency(number) * peers * (sent > 0)) * (units > 1))
        return seconds

    def message(self, size: float, crossed: Level | None) -> float:
        if crossed is None:
            return 0.0
        return size / (crossed.rates.ring * self.bandwidth(crossed)) + self.latency(self.cluster.levels.index(crossed))

    def bandwidth(self, level: Level) -> float:
        """Bytes per second of a device over a level, in one direction."""
        return level.bandwidth or NETWORK_SHARE * self.cluster.device.bandwidth

    def latency(self, number: int) -> float:
        """Seconds of a message to one peer over a level."""
        return self.cluster.levels[number].latency or LATENCIES[number > 0]


def peak(device: Device, dtype: str) -> float:
    """FLOPs per second of a device in `dtype`: stated, else by the peak of another narrow dtype that it states."""
    peaks: dict[str, float | None] = {n: getattr(device.peak, n) for n in ("bf16", "fp16", "fp8", "fp32", "fp64")}
    stated = {name: rate for name, rate in peaks.items() if rate}
    if dtype in stated:
        return stated[dtype]
    nearest = next(iter(stated.values()), FLOPS_PER_BYTE * device.bandwidth)
    return nearest / NARROW_OVER_FP32 if dtype in ("fp32", "fp64") and stated else nearest
