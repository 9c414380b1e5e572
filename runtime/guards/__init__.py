"""What watches a user's hands: mistakes that torch would let pass."""
