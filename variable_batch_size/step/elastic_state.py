"""What a wrapper saves beside its inner optimizer, and shares with its replicas."""

from __future__ import annotations

import hashlib
from typing import Any

from variable_batch_size.step.course import Course
from variable_batch_size.step.run import Run
from variable_batch_size.step.scaling import hyperparameters
from xla_replica.common.differences import check_same

VERSION = 5  # of the state
# Hyperparameters that say how a device computes, not what.
_OF_DEVICES = ("foreach", "fused", "capturable", "differentiable")


class ElasticState:
    """Saves and loads whatever counts something, for any number of replicas."""

    def __init__(self, run: Run, updates: Course) -> None:
        self._run, self._updates = run, updates
        self._lasting = lasting(run)  # as the run began

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last update. Reads the device for noise."""
        run, updates = self._run, self._updates
        return {
            "version": VERSION,
            "rule": run.rule.name,
            "settings": self._settings(),
            "scaling": updates.scaling.state_dict(),
            "noise": run.noise.state_dict() if run.noise else None,
            "sums": run.sums.state_dict(),
            "schedules": updates.attached.state_dict(),
            "sampler": run.sampler.state_dict(),
        }

    def check(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Raises ValueError unless `load` can take the state; changes nothing.

        Args:
            state: What `state_dict` returned, with or without the sampler's; nothing,
                where the state is one of a plain torch optimizer.
            allow_changes: See `CustomSampler.load_state_dict`.
        """
        run = self._run
        if state and state.get("version") != VERSION:
            raise ValueError(
                f"the state has version {state.get('version')!r}, and this library "
                f"reads {VERSION}: load state['state'] and state['param_groups'] alone"
            )
        if "sampler" in state:
            run.sampler.check_state(state["sampler"], allow_changes)
        if state.get("rule", run.rule.name) != run.rule.name:
            raise ValueError(
                f"the state is of rule {state['rule']!r}, and this is {run.rule.name!r}"
                ": to change it, load state['state'] and state['param_groups'] alone"
            )
        if "sampler" in state and not allow_changes:  # another run may have others
            check_same(
                state["settings"],
                self._settings(),
                "the optimizer's state is of another run",
                "Build the optimizer, and freeze its parameters, as they were; or pass "
                "allow_changes=True, which takes the saved hyperparameters",
            )
        self._updates.attached.check_state(state.get("schedules", []))
        if run.noise and state.get("noise"):
            run.noise.check_state(state["noise"])

    def _settings(self) -> dict[str, Any]:
        """Returns what the run began with, and which parameters are frozen now."""
        trained = (parameter.requires_grad for parameter in self._run.parameters())
        frozen = [number for number, is_trained in enumerate(trained) if not is_trained]
        return {**self._lasting, "the numbers of frozen parameters": frozen}

    def load(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Loads a state that `check` has let pass."""
        run, updates = self._run, self._updates
        updates.scaling.load_state_dict(state.get("scaling", []))
        if run.noise and state.get("noise"):
            run.noise.load_state_dict(state["noise"])
        run.sums.meet(state.get("sums"))
        updates.attached.load_state_dict(state.get("schedules", []), allow_changes)
        if "sampler" in state:
            run.sampler.load_state_dict(state["sampler"], allow_changes=allow_changes)
            updates.restart()


def lasting(run: Run) -> dict[str, Any]:
    """Returns what a run must have in common with one that it resumes.

    Plain values by name. The sampler's part is `CustomSampler.fingerprint`.
    """
    names = "ref_batchsize", "reduction", "ref_weight", "max_grad_norm", "float32_sums"
    found = {
        "optimizer": type(run.inner).__name__,
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
    kinds = repr([(*p.shape, p.dtype, p.requires_grad) for p in parameters])
    return {
        **run.sampler.fingerprint(),
        "rule": run.rule.name,
        **lasting(run),
        "noise": run.noise.options if run.noise else None,
        "lockstep": run.lockstep,
        "compare_every": run.compare_every,
        "shard_gradients": run.shard_gradients,
        "parameters": f"{len(parameters)} tensors of "
        f"{sum(p.numel() for p in parameters)} numbers, sha256 "
        f"{hashlib.sha256(kinds.encode()).hexdigest()[:16]}",
    }


def check_agreement(run: Run) -> None:
    """Raises ReplicaError if replicas would not train one model. Collective."""
    run.replica.check_agreement(
        "the settings of the run",
        common_settings(run),
        "Each would train another model: build sampler, model and optimizer alike "
        "on every replica, without the rank in seeds, files or conditions.",
    )
