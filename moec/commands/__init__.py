"""What each command does; `moec.cli` has their signatures."""
