"""`moec verify`: every rank of a plan in one process, compared with the unsharded model."""
