"""Measurements of Hocket against PyTorch's own Gloo and DistributedDataParallel, in one run."""
