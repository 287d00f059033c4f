"""What a wrapper saves beside the state of its inner optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.rules.scaling import Scaling
from variable_batch_size.step.attached import Attached
from variable_batch_size.step.settings import Settings
from xla_replica.common.differences import check_same


class ElasticState(NamedTuple):
    """The parts of a wrapper that count something, saved and loaded together.

    The state does not depend on the number of replicas.
    """

    settings: Settings
    lasting: dict[str, Any]  # `Settings.lasting`, as the run began
    scaling: Scaling
    noise: NoiseMeter | None
    attached: Attached
    sampler: CustomSampler

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last update. Reads the device for noise."""
        return {
            "rule": self.settings.rule.name,
            "ref_batchsize": self.settings.ref_batchsize,
            "settings": self.lasting,
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
        rule, ref_batchsize = self.settings.rule.name, self.settings.ref_batchsize
        if "sampler" in state:
            self.sampler.check_state(state["sampler"], allow_changes)
        if state.get("rule", rule) != rule:
            raise ValueError(
                f"the state is of rule {state['rule']!r}, and this optimizer has "
                f"{rule!r}; to change rules, load state['state'] and "
                "state['param_groups'] alone"
            )
        if "sampler" in state and not allow_changes:  # another run may have others
            saved = state.get("settings", {})  # of an earlier version: nothing
            check_same(
                saved,
                self.lasting,
                "the optimizer's state is of another run",
                "Build the optimizer as it was; or pass allow_changes=True to resume "
                "all the same, with the saved hyperparameters of parameter groups, and "
                "set others after that",
                {name: name for name in self.lasting if name in saved},
            )
        self.attached.check_state(state.get("schedules", []))
        if not (self.noise and state.get("noise")):
            return
        if state["ref_batchsize"] != ref_batchsize:
            raise ValueError(
                f"the state's progress counts steps of {state['ref_batchsize']} "
                f"samples, and this optimizer's ref_batchsize={ref_batchsize}"
            )
        self.noise.check_state(state["noise"])

    def load(self, state: dict[str, Any], allow_changes: bool) -> None:
        """Loads a state that `check` has let pass."""
        self.scaling.load_state_dict(state.get("scaling", []))
        if self.noise and state.get("noise"):
            self.noise.load_state_dict(state["noise"])
        self.attached.load_state_dict(state.get("schedules", []), allow_changes)
        if "sampler" in state:
            self.sampler.load_state_dict(state["sampler"], allow_changes=allow_changes)
