"""Checkpoints: how a training is saved, and goes on from what was saved."""
