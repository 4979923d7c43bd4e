"""Layer 5: messages become bytes."""
