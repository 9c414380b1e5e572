"""Which mutants a seed draws: from every room in proportion to its lines, templates of kernels as a room of their own.

A draw of 120 begins with the draw of 100: a draw can be made longer.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random

from mutation.mutant import Mutant
from mutation.python_mutants import python_mutants
from mutation.template_mutants import template_mutants

ROOMS = ("grammar", "passes", "codegen", "runtime", "moec")
TEMPLATES = "templates"
TRIES = 10_000


def room_of(file: str) -> str:
    """The room of a file, `templates` for one of kernels."""
    return TEMPLATES if file.endswith(".j2") else file.split("/")[0]


def sources(root: Path) -> dict[str, int]:
    """The files that are mutated, relative to `root`, and how many lines each has."""
    found = (path for room in ROOMS for suffix in ("py", "j2") for path in sorted((root / room).rglob(f"*.{suffix}")))
    lines = {path.relative_to(root).as_posix(): path.read_bytes().count(b"\n") for path in found}
    return {file: count for file, count in lines.items() if count}


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """The first `count` mutants of `seed`; no two are the same.

    A line is drawn from all lines of the room, then a kind among those that the line has, then one of that kind.
    Raises `ValueError` where a room has no mutant left.
    """
    files: dict[str, dict[str, int]] = defaultdict(dict)
    for file, lines in sources(root).items():
        files[room_of(file)][file] = lines
    sizes = {room: sum(of.values()) for room, of in files.items()}
    drawn: list[Mutant] = []
    taken = dict.fromkeys(sizes, 0)
    for number in range(count):
        # The room that is furthest behind its part of all lines.
        room = max(sizes, key=lambda each: (sizes[each] * (number + 1) / sum(sizes.values()) - taken[each], each))
        drawn.append(_draw_one(root, files[room], Random(f"{seed}/{room}/{taken[room]}"), drawn))
        taken[room] += 1
    return drawn


def _draw_one(root: Path, files: dict[str, int], dice: Random, drawn: list[Mutant]) -> Mutant:
    names, bounds = list(files), list(accumulate(files.values()))
    for _ in range(TRIES):
        file = dice.choices(names, cum_weights=bounds)[0]
        kinds = mutants_by_line(root / file, file).get(dice.randrange(files[file]) + 1)
        if not kinds:
            continue
        mutant = dice.choice(kinds[dice.choice(sorted(kinds))])
        if mutant not in drawn and mutant.is_change((root / file).read_bytes()):
            return mutant
    raise ValueError(f"no more mutants of {', '.join(names[:3])}")


@lru_cache(maxsize=512)
def mutants_by_line(path: Path, file: str) -> dict[int, dict[str, list[Mutant]]]:
    """All mutants of a file: by line, then by kind."""
    found: dict[int, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    find = template_mutants if file.endswith(".j2") else python_mutants
    for mutant in find(file, path.read_bytes()):
        found[mutant.line][mutant.kind].append(mutant)
    return {line: dict(kinds) for line, kinds in found.items()}
