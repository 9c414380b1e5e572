"""Placements of experts on a routing trace: rows of the busiest rank, and the time of a layer over an even load.

Without `--rows FOLDER` or MOEC_PUBLISHED_ROWS, a folder with `routing_trace.npz`, it measures nothing. Decisions know
loads 50 iterations old; the second half of the trace counts.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
from adaptivity.policies import eplb, fastermoe, guests, homes, smartmoe, static
from adaptivity.replay import NETWORKS, even_seconds, figures, moments, seconds
from bench_loads import TRACE
from bench_published import FOLDER
from rich.console import Console
from rich.table import Table

from moec.passes.guests.choice import LayerTime, Room, choose_guests
from moec.passes.guests.split import split

POLICIES = {
    "experts in order": static,
    "greedy (SmartMoE)": smartmoe,
    "replicas (EPLB)": eplb,
    "replicas in nodes (EPLB)": partial(eplb, nodes=2),
    "shadows (FasterMoE)": fastermoe,
    "homes that move": homes,
    "guests": guests,
    "guests, homes that move": partial(homes, with_guests=True),
}

EXPERTS, RANKS, RUNS = 256, 64, 7
"""The layer whose decisions are timed, and how often: the least counts."""


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, metavar="FOLDER", default=os.environ.get(FOLDER))
    options.add_argument("--slots", type=int, metavar="N", default=1, help="guests that a rank has room for")
    options = options.parse_args()
    console = Console(width=None if os.isatty(1) else 150)
    console.print(f"{EXPERTS} experts on {RANKS} ranks: {timed()}", highlight=False)
    if options.rows is None or not (file := Path(options.rows, TRACE)).is_file():
        print(f"nothing to replay: neither --rows nor {FOLDER} names a folder with {TRACE}")
        return
    trace = np.load(file)["counts"].astype(np.int64)
    for ep in (4, 8, 16):
        console.print(table_of(trace, ep, options.slots * ep))


def table_of(trace: np.ndarray, ep: int, slots: int) -> Table:
    """Of each policy the rows of the busiest rank over the mean, copies, and the time over an even load's."""
    title = (
        f"EP {ep}, {slots} slots: rows of the busiest rank over the mean / copies / time of a layer over an even one"
    )
    table = Table("policy", *(network.name for network in NETWORKS), title=title, title_justify="left")
    layers = list(moments(trace, ep))
    for name, policy in POLICIES.items():
        cells = list[str]()
        for network in NETWORKS:
            found = list[tuple[float, ...]]()
            for layer in layers:
                for moment, placed in zip(layer, policy(layer, network, ep, slots), strict=True):
                    of, rows = figures(placed, moment.now), float(moment.now.sum((1, 2)).max()) / ep
                    over_even = seconds(placed, of, network) / even_seconds(network, rows, ep)
                    found.append((of.rows / rows, placed.copies.sum() - len(placed.copies), over_even))
            cells.append("{:.3f} / {:.1f} / {:.3f}".format(*np.mean(found, 0)))
        table.add_row(name, *cells)
    return table


def timed() -> str:
    """Seconds of a decision, and of a split."""
    draw = np.random.default_rng(0)
    shares = draw.permutation(1 / np.arange(1, EXPERTS + 1))
    counts = (draw.uniform(0.5, 1.5, (RANKS, EXPERTS)) * shares / shares.sum() * 16384).astype(np.int64)
    homes, network = np.arange(EXPERTS) * RANKS // EXPERTS, LayerTime(0.28e-6, 0.25e-6, 2.3e-3, 0.8)
    of_choice, of_split, of_others = list[float](), list[float](), list[float]()
    others = homes[:, None] == np.arange(RANKS)
    others[np.arange(RANKS) * (EXPERTS // RANKS), np.roll(np.arange(RANKS), 1)] = True  # one guest of each rank
    for _ in range(RUNS):
        start = time.process_time()
        chosen = choose_guests(counts, homes, Room(1, RANKS), network)
        of_choice.append(time.process_time() - start)
        start = time.process_time()
        quotas = split(counts.sum(0), chosen.copies)
        of_split.append(time.process_time() - start)
        start = time.process_time()
        split(counts.sum(0), others)
        of_others.append(time.process_time() - start)
    copies, even = int(chosen.copies.sum()) - EXPERTS, quotas.sum(0).max() / quotas.sum() * RANKS
    times = f"choosing {copies} guests {min(of_choice) * 1e3:.1f} ms, splitting {min(of_split) * 1e3:.2f} ms"
    most = f"{min(of_others) * 1e3:.2f} ms with guests of {RANKS} experts"
    return f"{times}, {most}; busiest over mean {even:.3f}"


if __name__ == "__main__":
    main()
