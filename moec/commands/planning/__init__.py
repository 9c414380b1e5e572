"""`moec plan`: what a step of a file or a plan costs, whether it fits, and why."""
