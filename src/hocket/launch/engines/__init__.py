"""Where machines come from: each engine knows hosts, and has agents begin there; see ``engine``."""
