"""Layer 4: tensors become messages."""
