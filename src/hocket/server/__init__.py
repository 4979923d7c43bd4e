"""Layer 3': the parameter-server role: shards, placement, consistency, and what workers see of it."""
