"""`moec tune`: measures tiles on the device that is here."""
