"""Beside the layers, records of runs: what is shown of a run while it goes on, and what is kept of it."""
