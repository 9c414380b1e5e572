"""Where experts are: their guests, and homes that move, which a job chooses between steps."""
