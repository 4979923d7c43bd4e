"""Horovod's interface for scripts that were written for it: ``import hocket.horovod.torch as hvd``."""
