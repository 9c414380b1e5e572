"""The bodies of the commands; `moec.cli` has their signatures."""
