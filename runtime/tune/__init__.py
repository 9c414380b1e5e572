"""`moec tune`: measures tiles on this machine's device."""
