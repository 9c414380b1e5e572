"""Ranks and groups: how they meet, agree, watch each other and compare."""
