"""All ranks of a plan in one process, in lockstep."""
