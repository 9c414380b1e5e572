"""The command line: the signature of every command, a file for each group of them.

It has no semantics: only the file and `--let` change a plan. Bodies are in `moec.commands`, and are imported when their
command runs.

A new command needs: a function in one of these files, whose decorator has its examples, its reason to exit with 1 and
the names of its JSON documents; a line in `root.COMMANDS`; its documents in `moec.commands.schemas`; a line in
docs/status.md.
"""

from moec.cli.root import NOT_YET, app

__all__ = ["NOT_YET", "app"]
