"""Gradient-balanced example ordering (GraB) without a host round trip.

from grab_xla import GraBSampler

sampler = GraBSampler(dataset, dict(model.named_parameters()))
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
...
with sampler.record(model):  # of every batch
    losses = F.cross_entropy(model(x), y, reduction="none")
sampler.backward(losses)  # the .grad of losses.mean(), and the next epoch's order
"""

import grab_xla.contrib.ntk  # noqa: F401 (adds its balance types)
from grab_xla.balancers import BALANCE_TYPES, Balancer, Ordering, ordering_named
from grab_xla.balancing.decisions import Decisions
from grab_xla.balancing.prefix_sums import Herding, herding
from grab_xla.epoch.orders import GraBWarning
from grab_xla.gradients.fidelities import FIDELITIES
from grab_xla.options import Measurements, RandomProjection, Signs
from grab_xla.sampler import GraBSampler

__all__ = [
    "BALANCE_TYPES",
    "FIDELITIES",
    "Balancer",
    "Decisions",
    "GraBSampler",
    "GraBWarning",
    "Herding",
    "Measurements",
    "Ordering",
    "RandomProjection",
    "Signs",
    "herding",
    "ordering_named",
]
