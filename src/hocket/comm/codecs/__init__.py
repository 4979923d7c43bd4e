"""How gradients and differences travel between hosts in fewer bytes: one small class for each codec."""
