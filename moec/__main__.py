"""`moec`, and `python -m moec`."""

from __future__ import annotations

import gc


def main() -> None:
    """Runs the command line."""
    # What imports make lives until the end: looking for garbage among it takes a tenth of a short command's time.
    gc.disable()
    from moec import cli

    cli.main()


if __name__ == "__main__":
    main()
