"""Guests: weights of busy experts on other ranks for a step. Which experts and ranks, and how rows are split."""
