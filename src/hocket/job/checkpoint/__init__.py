"""A training is saved, and goes on from what was saved."""
