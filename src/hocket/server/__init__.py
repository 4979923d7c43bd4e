"""Layer 3': the parameter servers: shards, placement, consistency, and what workers see of the servers."""
