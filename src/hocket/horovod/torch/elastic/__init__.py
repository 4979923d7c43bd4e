"""``hvd.elastic``: training that goes on when workers are lost, come or leave."""

from hocket.horovod.elastic_run import run
from hocket.horovod.elastic_sampler import ElasticSampler
from hocket.horovod.elastic_states import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
