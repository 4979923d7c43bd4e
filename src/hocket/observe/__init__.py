"""Beside the layers: what is seen of a run while it goes on, and what is kept of it."""
