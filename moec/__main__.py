"""`python -m moec`."""

from moec.cli import main

main()
