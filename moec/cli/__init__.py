"""The command line: the signature of every command, a file for each group of them.

It has no semantics: only the file and `--let` change a plan. Bodies are in `moec.commands`, and are imported when their
command runs. A new command is a function in one of these files (or a new one) and a line in `root.COMMANDS`.
"""

from moec.cli.root import NOT_YET, app

__all__ = ["NOT_YET", "app"]
