"""`python -m moec`."""

from moec.entry import main

main()
