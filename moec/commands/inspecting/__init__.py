"""`moec inspect`: what a plan has and costs."""
