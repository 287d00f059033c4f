"""`GraBSampler.sorter`: what grab-sampler's users find in another object."""

from __future__ import annotations

import functools
from typing import Any

from grab_xla.epoch.epoch_metrics import EpochMetrics
from grab_xla.epoch.online_balancer import OnlineBalancer
from grab_xla.epoch.orders import Orders


class Sorter:
    """Measurements of the current epoch, and methods that the balance type hands on.

    Those are ``update_v(second_moment)`` of 'adamean' and ``compute_order(model,
    params, buffers, loss_fn)`` of 'ntk-eigen'; of your own type, what its
    `Ordering.order_methods` and `state_methods` name.
    """

    def __init__(
        self, orders: Orders, balancer: OnlineBalancer, metrics: EpochMetrics
    ) -> None:
        self._orders, self._balancer, self._metrics = orders, balancer, metrics

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
            return functools.partial(self._give, getattr(ordering, name))
        if name in ordering.state_methods:
            return functools.partial(self._balancer.change_state, name)
        raise AttributeError(f"the sorter of {type(ordering).__name__} has no {name!r}")

    def _give(self, order_of: Any, *args: Any, **options: Any) -> None:
        self._orders.give(order_of(*args, **options))
