"""`GraBSampler.sorter`: what grab-sampler's users find in another object."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from grab_xla.epoch.epoch_metrics import EpochMetrics
from grab_xla.epoch.online_balancer import OnlineBalancer
from grab_xla.epoch.orders import Orders


@dataclasses.dataclass(frozen=True)
class Sorter:
    """Measurements of the current epoch, and methods that the balance type hands on.

    Those are ``update_v(second_moment)`` of 'adamean' and ``compute_order(model,
    params, buffers, loss_fn)`` of 'ntk-eigen'; of your own type, what its
    `Ordering.order_methods` and `state_methods` name.
    """

    _orders: Orders
    _balancer: OnlineBalancer
    _metrics: EpochMetrics

    @property
    def grad_norms(self) -> list[float]:
        """The gradients' norms in the order visited, if ``record_norm``."""
        return self._metrics.norms()

    @property
    def herding(self) -> float:
        """The largest infinity norm of a prefix sum so far, if ``record_herding``."""
        return self._metrics.herding()[0]

    @property
    def avg_grad_error(self) -> float:
        """The largest 2-norm of a prefix sum so far, if ``record_herding``."""
        return self._metrics.herding()[1]

    def __getattr__(self, name: str) -> Any:
        ordering = self._orders.ordering
        if name in ordering.order_methods:
            order_of = getattr(ordering, name)
            return lambda *of, **options: self._orders.give(order_of(*of, **options))
        if name in ordering.state_methods:
            return functools.partial(self._balancer.change_state, name)
        raise AttributeError(f"the sorter of {type(ordering).__name__} has no {name!r}")
