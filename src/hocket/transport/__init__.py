"""Layer 5, how bytes move between processes: shared memory, sockets, Gloo, NCCL and simulations of them."""
