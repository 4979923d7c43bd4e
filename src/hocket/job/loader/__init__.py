"""Which samples this worker gets, and the loader that yields them."""
