"""An optimizer that shares groups, state and hooks with the one it wraps."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from xla_replica.common.arguments import check_number


def _of_inner(name: str) -> property:
    """Returns an attribute of the proxy that lives on the inner optimizer."""

    def get(self: OptimizerProxy) -> Any:
        return getattr(self.inner, name)

    def set(self: OptimizerProxy, value: Any) -> None:
        setattr(self.inner, name, value)

    return property(get, set)


class OptimizerProxy(Optimizer):
    """Shares groups, state and hooks with ``inner``, so torch's schedulers take it.

    They are properties, not copies, because loading a state replaces the groups. Step
    hooks, torch's global ones too, run around the inner optimizer's step, so once an
    update.
    """

    param_groups = _of_inner("param_groups")
    state = _of_inner("state")
    defaults = _of_inner("defaults")
    register_step_pre_hook = _of_inner("register_step_pre_hook")
    register_step_post_hook = _of_inner("register_step_post_hook")
    register_state_dict_pre_hook = _of_inner("register_state_dict_pre_hook")
    register_state_dict_post_hook = _of_inner("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _of_inner("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _of_inner("register_load_state_dict_post_hook")

    # Optimizers that average weights have these (schedule-free ones); others do not.
    train = _of_inner("train")
    eval = _of_inner("eval")

    # GradScaler then hands its scale to step(), which refuses it, instead of unscaling
    # gradients before step() can know.
    _step_supports_amp_scaling = True

    def __init__(self, inner: Optimizer) -> None:
        # Torch's constructor is not called: all that it makes is the inner one's.
        self.inner = inner

    def get_lr(self) -> tuple[float, ...]:
        """Returns the reference learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self.param_groups)

    def set_lr(self, values: tuple[float, ...]) -> None:
        """Sets the reference learning rate of each parameter group.

        Raises ValueError or TypeError unless there is one for each.
        """
        for group, value in [*zip(self.param_groups, values, strict=True)]:
            group["lr"] = check_number("set_lr: the learning rate", value, least=0)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because it is bound "
            "to a running replica: save optimizer.state_dict() instead"
        )
