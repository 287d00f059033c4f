"""Gradient-balanced example ordering (GraB) without a host round trip.

from grab_xla import GraBSampler

sampler = GraBSampler(dataset, dict(model.named_parameters()))
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
...
sampler.step(per_sample_grads)  # a dict of (B, *shape) tensors, once per batch
"""

__all__: list[str] = []
