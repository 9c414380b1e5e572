"""What lies in the folder of a checkpoint, and how it is written and read."""
