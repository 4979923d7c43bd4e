"""Layer 4, collectives and exchanges of tensors: how groups of workers add up, average, gather and gossip."""
