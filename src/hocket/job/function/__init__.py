"""A function of a notebook, script or module becomes the script of workers."""
