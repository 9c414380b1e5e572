"""Searches for the degrees with the shortest predicted step that fit."""
