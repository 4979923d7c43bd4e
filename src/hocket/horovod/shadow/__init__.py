"""A folder that ``--as-horovod`` puts before all others, so that ``import horovod`` finds what is in it."""
