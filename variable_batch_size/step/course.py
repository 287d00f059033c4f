"""Where a run goes between its updates: it begins, is restored, begins an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from variable_batch_size.step.run import Run
from variable_batch_size.step.scaling import hyperparameters
from variable_batch_size.step.update import Updates
from xla_replica.common.differences import check_same

VERSION = 6  # of the state
# Hyperparameters that say how a device computes, not what.
_OF_DEVICES = ("foreach", "fused", "capturable", "differentiable")


class Course(Updates):
    """The updates of a run that has the same replicas throughout; see `LiveUpdates`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lasting = lasting(self.run)  # as the run began

    def enter(self, settings: Any, modules: Any, begin: Any, saver: Any) -> None:
        """Begins a run. A live one may be joined instead."""
        del settings, modules, saver
        begin()
        self.attached.has_entered = True

    def between(self, function: Callable[[], Any]) -> Any:
        """Returns what a function of all replicas returns, between two updates.

        In a live run it runs again where a member is lost in it, see `after`.
        """
        return function()

    def begin_epoch(self, epoch: int) -> None:
        """Goes to the first step of an epoch.

        Raises ReplicaError where other replicas would not begin it too.
        """
        if self.account.is_waiting:
            raise self.account.not_ended()
        is_lost = self.account.begin(epoch)
        if is_lost is None:
            return
        if is_lost:
            self.clear()
        self.gradients.refresh()
        self.begin_minibatch()

    # --- what a wrapper saves, for any number of replicas ----------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last update. Reads the device for noise."""
        run = self.run
        return {
            "version": VERSION,
            "settings": self._settings(),
            "scaling": self.scaling.state_dict(),
            "noise": run.noise.state_dict() if run.noise else None,
            "sums": run.sums.state_dict(),
            "schedules": self.attached.state_dict(),
            "sampler": run.sampler.state_dict(),
        }

    def _settings(self) -> dict[str, Any]:
        """Returns what the run began with, and which parameters are frozen now."""
        frozen = [n for n, p in enumerate(self.run.parameters()) if not p.requires_grad]
        return {**self._lasting, "the numbers of frozen parameters": frozen}

    def check_state(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Raises ValueError unless `load_state_dict` can take it; changes nothing.

        Args:
            state: What `state_dict` returned, with or without the sampler's; nothing,
                where the state is one of a plain torch optimizer.
            allow_changes: See `CustomSampler.load_state_dict`.
        """
        run = self.run
        if state and state.get("version") != VERSION:
            raise ValueError(
                f"the state has version {state.get('version')!r}, and this library "
                f"reads {VERSION}: load state['state'] and state['param_groups'] alone"
            )
        if "sampler" in state:
            run.sampler.check_state(state["sampler"], allow_changes)
        if "sampler" in state and not allow_changes:  # another run may have others
            what = "the optimizer's state is of another run"
            remedy = (
                "Build the optimizer, and freeze its parameters, as they were; or pass "
                "allow_changes=True, which takes the saved hyperparameters"
            )
            check_same(state["settings"], self._settings(), what, remedy)
        self.attached.check_state(state.get("schedules", []), allow_changes)
        if run.noise and state.get("noise"):
            run.noise.check_state(state["noise"])

    def load_state_dict(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Loads a state that `check_state` has let pass."""
        run = self.run
        is_same = state.get("settings", {}).get("rule") == run.rule.name
        self.scaling.load_state_dict(state["scaling"] if is_same else [])
        if run.noise and state.get("noise"):
            run.noise.load_state_dict(state["noise"])
        run.sums.meet(state.get("sums"))
        self.attached.load_state_dict(state.get("schedules", []))
        if "sampler" in state:
            run.sampler.load_state_dict(state["sampler"], allow_changes=allow_changes)
            self.restart()

    def restart(self) -> None:
        """Forgets what was accumulated before the sampler was placed elsewhere."""
        self.num_seen = 0
        self.clear()
        self.begin_minibatch()


def lasting(run: Run) -> dict[str, Any]:
    """Returns what a run must have in common with one that it resumes.

    Plain values by name. The sampler's part is `CustomSampler.fingerprint`.
    """
    names = "ref_batchsize", "reduction", "ref_weight", "max_grad_norm", "float32_sums"
    found = {
        "optimizer": type(run.inner).__name__,
        "rule": run.rule.name,
        "momentum_correction": run.rule.momentum_correction,
        "decay_per_sample": run.rule.decay_per_sample,
        **{name: getattr(run, name) for name in names},
        "exact": run.sums.is_exact,
        **run.sums.environment(),
    }
    for index, group in enumerate(run.inner.param_groups):
        place = f" of parameter group {index}" if index else ""
        for name, value in hyperparameters([group]):
            if name not in _OF_DEVICES:
                found[name + place] = value
    return found


def common_settings(run: Run) -> dict[str, Any]:
    """Returns what all replicas of a run have in common, by name."""
    parameters = run.parameters()
    names = "lockstep", "compare_every", "shard_gradients"
    kinds = repr([(*p.shape, p.dtype, p.requires_grad) for p in parameters])
    return {
        **run.sampler.fingerprint(),
        **lasting(run),
        "noise": run.noise.options if run.noise else None,
        **{name: getattr(run, name) for name in names},
        "parameters": f"{len(parameters)} tensors of "
        f"{sum(p.numel() for p in parameters)} numbers, sha256 "
        f"{hashlib.sha256(kinds.encode()).hexdigest()[:16]}",
    }
