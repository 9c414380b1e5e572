"""Scripts that tests run as processes: ranks that die or end at a chosen moment."""

from pathlib import Path

SCRIPTS = Path(__file__).parent
