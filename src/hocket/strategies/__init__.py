"""Layer 3: what is exchanged, and when."""
