"""`MOEC_LOG_ACTIONS=FOLDER`: each rank writes what it does in its steps to `FOLDER/rankN.actions`, a line for each.

The lines are actions of a step (`moec.passes.ir.order`) and the events inside of them (`events_inside` of
`moec.passes.place.schedule`), so that a log can be compared with a plan's schedule.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MOEC_LOG_ACTIONS"


def note_action(kind: str, unit: str = "") -> None:
    """Adds a line, such as `gather layers.3` or `sum`; does nothing where the variable is not set."""
    folder = os.environ.get(VARIABLE)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"rank{os.environ.get('RANK', '0')}.actions"
        with path.open("a", encoding="utf-8") as log:
            log.write(f"{kind} {unit}".rstrip() + "\n")
