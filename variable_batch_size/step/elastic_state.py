"""What a wrapper saves beside the state of its inner optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.rules.rule import Rule
from variable_batch_size.rules.scaling import Scaling
from variable_batch_size.step.attached import Attached


class ElasticState(NamedTuple):
    """The parts of a wrapper that count something, saved and loaded together.

    The state does not depend on the number of replicas.
    """

    rule: Rule
    ref_batchsize: int | None
    scaling: Scaling
    noise: NoiseMeter | None
    attached: Attached
    sampler: CustomSampler

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last update. Reads the device for noise."""
        return {
            "rule": self.rule.name,
            "ref_batchsize": self.ref_batchsize,
            "scaling": self.scaling.state_dict(),
            "noise": self.noise.state_dict() if self.noise else None,
            "schedules": self.attached.state_dict(),
            "sampler": self.sampler.state_dict(),
        }

    def check(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Raises ValueError unless `load` can take the state; changes nothing.

        Args:
            state: What `state_dict` returned; parts may be missing.
            allow_changes: See `CustomSampler.load_state_dict`.
        """
        if "sampler" in state:
            self.sampler.check_state(state["sampler"], allow_changes)
        if state.get("rule", self.rule.name) != self.rule.name:
            raise ValueError(
                f"the state is of rule {state['rule']!r}, and this optimizer has "
                f"{self.rule.name!r}; to change rules, load state['state'] and "
                "state['param_groups'] alone"
            )
        self.attached.check_state(state.get("schedules", []))
        if not (self.noise and state.get("noise")):
            return
        if state["ref_batchsize"] != self.ref_batchsize:
            raise ValueError(
                f"the state's progress counts steps of {state['ref_batchsize']} "
                f"samples, and this optimizer's ref_batchsize={self.ref_batchsize}"
            )
        self.noise.check_state(state["noise"])

    def load(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Loads a state that `check` has let pass."""
        self.scaling.load_state_dict(state.get("scaling", []))
        if self.noise and state.get("noise"):
            self.noise.load_state_dict(state["noise"])
        self.attached.load_state_dict(state.get("schedules", []))
        if "sampler" in state:
            self.sampler.load_state_dict(state["sampler"], allow_changes=allow_changes)
