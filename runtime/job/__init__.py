"""A rank of a job: its process groups, model, steps and watch."""
