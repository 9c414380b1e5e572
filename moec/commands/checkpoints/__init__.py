"""`moec checkpoint` and `moec weights`."""
