"""What a wrapper saves and loads beside the inner optimizer's state."""

from __future__ import annotations

import dataclasses
from typing import Any

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.rules.rule import Rule
from variable_batch_size.rules.scaling import Scaling
from variable_batch_size.step.update import Attached


@dataclasses.dataclass(frozen=True)
class ElasticState:
    """The parts of a wrapper that count: place, rule, noise meter and schedulers."""

    sampler: CustomSampler
    rule: Rule
    ref_batchsize: int | None
    scaling: Scaling
    noise: NoiseMeter | None
    attached: Attached

    def state_dict(self) -> dict[str, Any]:
        """Where they stand; reads the device if noise is measured."""
        return {
            "rule": self.rule.name,
            "ref_batchsize": self.ref_batchsize,
            "scaling": self.scaling.state_dict(),
            "noise": self.noise.state_dict() if self.noise else None,
            "schedules": self.attached.state_dict(),
            "sampler": self.sampler.state_dict(),
        }

    def check_state(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Before anything is touched.

        Raises:
            ValueError: `load_state_dict` cannot take it.
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

    def load_state_dict(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Takes what `state_dict` gave; empty, that of a plain torch optimizer."""
        if "sampler" in state:
            self.sampler.load_state_dict(state["sampler"], allow_changes=allow_changes)
        self.scaling.load_state_dict(state.get("scaling", []))
        if self.noise and state.get("noise"):
            self.noise.load_state_dict(state["noise"])
        self.attached.load_state_dict(state.get("schedules", []))
