"""Sends a function of a notebook, script or module to workers, which run it as their script."""
