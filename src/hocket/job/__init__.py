"""Layer 2, the worker in a script's process: what a script calls, its loader, training loops and checkpoints."""
