"""Layer 1: a script becomes processes."""
