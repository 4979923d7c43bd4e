"""Beside the layers: several strategies on one script, side by side: which runs, what they found, and how it looks."""
