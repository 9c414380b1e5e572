"""The cost of a placed Program: the cost of each op, and totals over blocks, ranks and steps."""
