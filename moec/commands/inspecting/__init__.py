"""`moec inspect`: the contents and the costs of a plan."""
