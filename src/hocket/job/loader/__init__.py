"""The loader that yields this worker's samples, and the rules by which workers share them."""
