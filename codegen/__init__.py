"""`Program` to `Plan`: graphs as checked data, the plan folder, and torch.fx modules built from it."""
