"""A rank of a job: its groups, its model, its steps, and what watches over them."""
