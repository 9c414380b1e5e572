"""Scripts that tests run as processes: ranks that die or end at a chosen moment, and an interpreter's client."""

from pathlib import Path

SCRIPTS = Path(__file__).parent
