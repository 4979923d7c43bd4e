"""Autograd becomes buckets: hooks, slots, and which bucket is complete."""
