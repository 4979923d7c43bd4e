"""Layer 2: a process becomes a worker."""
