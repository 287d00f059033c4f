"""What a wrapper saves beside the state of its inner optimizer."""

from __future__ import annotations

from typing import Any

from variable_batch_size.step.scaling import hyperparameters
from variable_batch_size.step.settings import StepContext
from variable_batch_size.step.update import Updates
from xla_replica.common.differences import check_same

VERSION = 3  # of the state
# Hyperparameters that say how a device computes, not what.
_OF_DEVICES = ("foreach", "fused", "capturable", "differentiable")


class ElasticState:
    """Saves and loads the parts of a wrapper that count something.

    The state does not depend on the number of replicas.
    """

    def __init__(self, context: StepContext, updates: Updates) -> None:
        self._context, self._updates = context, updates
        self._lasting = _lasting(context)  # as the run began

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last update. Reads the device for noise."""
        settings, noise = self._context.settings, self._context.noise
        exact = self._context.exact
        return {
            "version": VERSION,
            "rule": settings.rule.name,
            "ref_batchsize": settings.ref_batchsize,
            "settings": self._lasting,
            "trained": [p.requires_grad for p in self._context.parameters()],
            "scaling": self._updates.scaling.state_dict(),
            "noise": noise.state_dict() if noise else None,
            "grid": exact.grid.state_dict() if exact else None,
            "schedules": self._updates.attached.state_dict(),
            "sampler": self._context.sampler.state_dict(),
        }

    def check(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Raises ValueError unless `load` can take the state; changes nothing.

        Args:
            state: What `state_dict` returned, with or without the sampler's; nothing,
                where the state is one of a plain torch optimizer.
            allow_changes: See `CustomSampler.load_state_dict`.
        """
        settings, noise = self._context.settings, self._context.noise
        rule, ref_batchsize = settings.rule.name, settings.ref_batchsize
        if state and state.get("version") != VERSION:
            raise ValueError(
                f"the state has version {state.get('version')!r}, and this library "
                f"reads {VERSION}: load state['state'] and state['param_groups'] alone"
            )
        if "sampler" in state:
            self._context.sampler.check_state(state["sampler"], allow_changes)
        if state.get("rule", rule) != rule:
            raise ValueError(
                f"the state is of rule {state['rule']!r}, and this is {rule!r}; to "
                "change rules, load state['state'] and state['param_groups'] alone"
            )
        if "sampler" in state and not allow_changes:  # another run may have others
            check_same(
                state["settings"],
                self._lasting,
                "the optimizer's state is of another run",
                "Build the optimizer as it was; or pass allow_changes=True to resume "
                "all the same, with the saved hyperparameters of parameter groups, and "
                "set others after that",
            )
            self._check_trained(state["trained"])
        self._updates.attached.check_state(state.get("schedules", []))
        if not (noise and state.get("noise")):
            return
        if state["ref_batchsize"] != ref_batchsize:
            raise ValueError(
                f"the state's progress counts steps of {state['ref_batchsize']} "
                f"samples, and this optimizer's ref_batchsize={ref_batchsize}"
            )
        noise.check_state(state["noise"])

    def _check_trained(self, trained: list[bool]) -> None:
        """Raises ValueError if other parameters were trained where it was saved."""
        parameters = self._context.parameters()
        others = [
            f"number {number} of shape {tuple(parameter.shape)} was "
            f"{'trained' if was_trained else 'frozen'}"
            for number, (parameter, was_trained) in enumerate(zip(parameters, trained))
            if parameter.requires_grad != was_trained
        ]
        if others:
            raise ValueError(
                f"requires_grad of {len(others)} of the optimizer's {len(parameters)} "
                f"parameters is not as it was saved: {'; '.join(others[:5])}. Freeze "
                "and unfreeze before you load, or pass allow_changes=True"
            )

    def load(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Loads a state that `check` has let pass."""
        noise, updates = self._context.noise, self._updates
        updates.scaling.load_state_dict(state.get("scaling", []))
        if noise and state.get("noise"):
            noise.load_state_dict(state["noise"])
        if self._context.exact:
            self._context.exact.meet(state.get("grid") or {})
        updates.attached.load_state_dict(state.get("schedules", []), allow_changes)
        if "sampler" in state:
            self._context.sampler.load_state_dict(
                state["sampler"], allow_changes=allow_changes
            )
            updates.restart()


def _lasting(context: StepContext) -> dict[str, Any]:
    """Returns what a run must have in common with one that it resumes.

    Plain values by name. The sampler's part is `CustomSampler.fingerprint`.
    """
    found = {"optimizer": type(context.inner).__name__, **context.settings.options()}
    for index, group in enumerate(context.inner.param_groups):
        place = f" of parameter group {index}" if index else ""
        for name, value in hyperparameters([group]):
            if name not in _OF_DEVICES:
                found[name + place] = value
    return found
