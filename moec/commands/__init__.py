"""What the larger commands do; `moec/cli.py` holds their options."""
