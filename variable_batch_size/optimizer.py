"""Optimizer wrappers that accumulate, sum over replicas and scale the learning rate."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import xla_replica
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.gradient_noise.meter import NoiseMeter
from variable_batch_size.gradient_noise.options import NoiseOptions, chosen_options
from variable_batch_size.rules.rule import Rule, with_options
from variable_batch_size.rules.scaling import Scaling
from variable_batch_size.step.agreement import Agreement
from variable_batch_size.step.buffers import average_buffers
from variable_batch_size.step.checks import (
    check_groups,
    check_numbers,
    check_optimizer,
    check_rule,
    check_sampler,
    check_step,
)
from variable_batch_size.step.device_scalars import Numbers, as_floats
from variable_batch_size.step.elastic_state import ElasticState
from variable_batch_size.step.proxy import OptimizerProxy
from variable_batch_size.step.report import describe, lrs_to_come
from variable_batch_size.step.step_gradients import StepGradients, parameters_of
from variable_batch_size.step.steps import Steps
from variable_batch_size.step.stop_vote import StopVote
from variable_batch_size.step.update import Attached
from variable_batch_size.step.update_graph import UpdateGraph
from xla_replica import Replica

logger = logging.getLogger(__name__)


class ElasticOptimizer(OptimizerProxy):
    """Wraps a torch optimizer so that its global batch size follows a trace.

    Call `step` after every ``loss.backward()``. It accumulates until this replica has
    run its minibatches of the step, then sums gradients over replicas, divides by the
    step's number of minibatches, scales the learning rate and updates. The loss must
    be the mean over the minibatch.

    The reference learning rate stays in ``param_groups``; the scaled one stands there
    only while the inner optimizer runs. torch's LR schedulers and step hooks work on
    the wrapper and on the inner optimizer alike; step hooks run once an update, around
    the inner optimizer, when gradients are already summed.

    **Idle replicas.** A replica without a minibatch in a step runs no forward pass and
    adds nothing. It joins the update inside its previous `step` call, or in `set_epoch`
    where the epoch begins with such steps. `step` therefore returns how many updates it
    made, and whatever must happen once per update (an LR scheduler, a log) belongs into
    `attach`, which runs it for these updates too. Replicas that use different learning
    rates raise `ReplicaError`: at once where the cause is seen or reading is free, else
    in `average_buffers` and on logging steps.

    Gradients are allocated at construction and zeroed in place; `zero_grad` does
    nothing. A parameter that took no part in the loss has a gradient of zero, not None.

    Construction is collective: parameters are made equal to those of replica 0.

    Args:
        optimizer: The optimizer to wrap, built after the model was moved to its device.
        sampler: The sampler that feeds this replica.
        rule: How the learning rate follows the batch; a key of ``lr_rules.RULES``,
            ``'power:ALPHA'``, or a `Rule`.
        ref_batchsize: Batch size at which the reference learning rate was tuned.
        log_steps: Log step, batch size and learning rate every so many updates.
        max_grad_norm: Clip the summed and averaged gradient to this global norm.
        momentum_correction: For SGD: apply the rule's factor to the gradient, inside
            the momentum buffer; see `Rule`.
        decay_per_sample: Scale weight decay so that weights decay by the same amount
            per sample whatever the rule: for SGD and AdamW; see `Rule`.
        noise: Measure gradient noise, with these options or, if True, the default ones;
            `noise` then answers. AdaScale always does.
        replica: Default: the one the caller runs in.

    Raises:
        ValueError, TypeError: An argument is out of range or of the wrong type.
    """

    # For whoever would skip a step: `step` must be called after every backward pass.
    steps_by_itself = True

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        rule: str | Rule = "linear",
        ref_batchsize: int | None = None,
        log_steps: int | None = None,
        *,
        max_grad_norm: float | None = None,
        momentum_correction: bool = False,
        decay_per_sample: bool = False,
        noise: NoiseOptions | bool = False,
        replica: Replica | None = None,
    ) -> None:
        self.sampler = sampler
        self.replica = xla_replica.current() if replica is None else replica
        self.rule = with_options(rule, momentum_correction, decay_per_sample)
        self.ref_batchsize = ref_batchsize
        self.log_steps = log_steps
        self.max_grad_norm = max_grad_norm
        check_optimizer(optimizer, self.rule)
        check_sampler(sampler, self.replica)
        check_numbers(
            self.rule, ref_batchsize, log_steps=log_steps, max_grad_norm=max_grad_norm
        )
        self._check_groups(optimizer.param_groups)
        super().__init__(optimizer)
        self._last_lr: tuple[Any, ...] = self.get_lr()
        numbers = Numbers(self.replica)
        self._scaling = Scaling(self.rule, self.replica, numbers)
        self._agreement = Agreement(self.replica, numbers)
        self._stop_vote = StopVote(self.replica, numbers)
        self.noise = self._make_meter(noise, numbers)
        self._attached = Attached(self.noise)
        self._gradients = gradients = StepGradients(optimizer, self.replica, self.noise)
        self._steps = Steps(sampler.plan, self.replica, optimizer, gradients)
        self._update_graph = UpdateGraph(
            optimizer,
            self.replica,
            numbers,
            self._scaling,
            self._agreement,
            self._stop_vote,
            gradients,
        )
        gradients.take_in(parameters_of(optimizer))

    # --- the training loop's calls --------------------------------------------------

    def step(self, closure: None = None) -> int:  # type: ignore[override]
        """Accumulates one minibatch's gradient, and updates if it was the step's last.

        Returns:
            The number of updates made: 0 while accumulating; 1 for an update; more if
            this replica is idle in the steps that follow, which it joins at once.

        Raises:
            ValueError: The epoch has no such step: `set_epoch` was forgotten, or the
                loop ran more minibatches than the sampler yields.
            ReplicaError: Going on would make replicas disagree.
        """
        check_step(closure, getattr(self, "found_inf", None))
        if not self._steps.end_minibatch(self.sampler.plan):
            return 0
        self._update()
        return 1 + self._join_idle_steps()

    def set_epoch(self, epoch: int) -> int:
        """Begins an epoch; call it, like the sampler's, before iterating.

        Returns:
            The number of updates made: those of the steps at the beginning of the
            epoch in which this replica is idle.

        Raises:
            TraceExhausted: The trace has ended and ``on_end='error'``.
            ReplicaError: The epoch under way has steps left, which other replicas take.
        """
        if self._steps.stands_before(epoch):
            return 0
        self._steps.begin_epoch(self.sampler.plan_of(epoch))
        return self._join_idle_steps()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients are zeroed, in place, after every update."""
        del set_to_none

    def attach(self, target: Any, unit: str = "updates", every: float = 1) -> None:
        """Runs ``target`` after every update on this replica, idle or not.

        Args:
            target: A torch LR scheduler; or a function that takes an `Update`.
            unit: What a scheduler counts: ``'updates'``, ``'samples'``, ``'epochs'``,
                or ``'iterations'``: scale-invariant ones (`NoiseMeter.progress`).
            every: A scheduler is stepped once every so many units.

        Raises:
            TypeError: It is neither, or a scheduler whose step needs a metric.
            ValueError: ``unit`` or ``every`` is not allowed.
        """
        self._attached.add(target, unit, every)

    def average_buffers(self, model: nn.Module) -> None:
        """Makes the model's floating-point buffers equal on all replicas.

        Each replica weighs as many samples as it has seen since the last call. Call it
        on every replica before evaluation and before a checkpoint: BatchNorm's running
        statistics drift apart, because replicas see different minibatches and
        different numbers of them. What it costs is two sums over the buffers. See
        `variable_batch_size.step.buffers` for what it cannot restore.

        Raises:
            ReplicaError: Replicas have used different hyperparameters; on an
                accelerator this is where it is found.
        """
        self._agreement.check()
        average_buffers(model, self._steps.num_minibatches_seen, self.replica)
        self._steps.num_minibatches_seen = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. Collective: its parameters become those of replica 0."""
        if self._wrapping:
            return
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        param_group = {**param_group, "params": params}
        unnamed = [p[1] if isinstance(p, tuple) else p for p in params]
        self._check_groups([{**self.defaults, **param_group, "params": unnamed}])
        super().add_param_group(param_group)
        self._gradients.take_in(self.param_groups[-1]["params"])

    # --- what can be asked ----------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self._steps.counter.plan.epoch

    def get_bs(self) -> int:
        """Global batch size of the step under way; 0 at the end of the epoch."""
        return self._steps.counter.batch_size

    def asked_to_stop(self, look: bool = False) -> bool:
        """Whether all replicas are to stop after the update that was made last.

        Ask inside `attach`, where all replicas have made the same updates, as
        `Checkpointer` does. They agree without a collective or, unless ``look``, a
        transfer of their own; see `variable_batch_size.step.stop_vote`.

        Args:
            look: Every replica looks, at this update on all of them: finds a request
                that has reached some replicas only.
        """
        return self._stop_vote.agreed(look)

    def current_lr(self) -> float:
        """The effective learning rate of the step under way, of the first group.

        At the end of an epoch: that of its last update.
        """
        return self._current_lrs()[0]

    # --- what is saved --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, with reference learning rates, and under
        ``"elastic"`` the sampler's, and what rule, noise meter and attached schedulers
        have counted.

        That of the last update: minibatches accumulated since are not in it, and are
        run again by whoever loads it. It loads into a plain torch optimizer too, and
        does not depend on the number of replicas.
        """
        elastic = self._elastic_state().state_dict()
        return {**super().state_dict(), "elastic": elastic}

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        *,
        place: bool = True,
        allow_changes: bool = False,
    ) -> None:
        """Loads what `state_dict` gave, or the state of a plain torch optimizer.

        The sampler is restored with it: begin the loop at ``sampler.epoch``.
        Schedulers may be attached before or after, in the same order as they were.

        Args:
            state_dict: On every replica.
            place: Go on at the saved epoch and step. If False, only weights' states,
                schedulers and measurements are taken: for another training run.
            allow_changes: See `CustomSampler.load_state_dict`.

        Raises:
            ValueError: It does not fit the parameter groups, or is of another rule or
                a run on other samples.
        """
        elastic, own = dict(state_dict.get("elastic", {})), self._elastic_state()
        if not place:
            elastic.pop("sampler", None)
        own.check_state(elastic, allow_changes)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "elastic"})
        own.load_state_dict(elastic, allow_changes)
        if "sampler" in elastic:
            self._steps.restart(self.sampler.plan)

    # --- how ------------------------------------------------------------------------

    def _join_idle_steps(self) -> int:
        """Takes part in the steps in which this replica has no minibatch."""
        joined = 0
        while self._steps.begin_idle_step():
            self._update()
            joined += 1
        return joined

    def _update(self) -> None:
        counter = self._steps.counter
        ratio = counter.batch_size / (self.ref_batchsize or 1)
        update = self._update_graph.run(counter, ratio, self.max_grad_norm)
        self._last_lr = update.lr
        self._opt_called = True  # what torch's schedulers look at before their step
        self.sampler.commit(counter.cursor.epoch, counter.cursor.step)
        self._attached.run(update)
        self._steps.end_update()
        if self.log_steps and update.step % self.log_steps == 0:
            self._agreement.check()
            line = describe(update, self.noise, self.replica)
            if self.replica.is_primary:
                logger.info(line)

    def _check_groups(self, groups: list[dict[str, Any]]) -> None:
        check_groups(groups, self.replica)
        check_rule(groups, self.rule, self.sampler.schedule, self.ref_batchsize)

    def _make_meter(
        self, noise: NoiseOptions | bool, numbers: Numbers
    ) -> NoiseMeter | None:
        options = chosen_options(noise, self.rule.measured, self.ref_batchsize)
        if options is None:
            return None
        return NoiseMeter(
            self.param_groups,
            self.sampler.minibatch_size,
            self.ref_batchsize,
            self.replica,
            numbers,
            options,
        )

    def _elastic_state(self) -> ElasticState:
        return ElasticState(
            self.sampler,
            self.rule,
            self.ref_batchsize,
            self._scaling,
            self.noise,
            self._attached,
        )

    def _current_lrs(self) -> tuple[float, ...]:
        counter = self._steps.counter
        if counter.ended:
            return as_floats(self._last_lr, self.replica)
        lrs, batch_size = self.get_lr(), counter.batch_size
        return lrs_to_come(lrs, self.rule, self.noise, batch_size, self.ref_batchsize)
