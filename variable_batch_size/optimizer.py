"""Optimizer wrappers that accumulate, sum over replicas and scale the learning rate."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import xla_replica
from variable_batch_size.accumulate import GradientBuffers
from variable_batch_size.agreement import Agreement
from variable_batch_size.buffers import average_buffers
from variable_batch_size.checks import (
    HyperparameterWatch,
    check_groups,
    check_numbers,
    check_optimizer,
    check_rule,
    check_sampler,
    hyperparameters,
)
from variable_batch_size.lr_rules import Rule, with_options
from variable_batch_size.noise_meter import NoiseMeter
from variable_batch_size.noise_options import NoiseOptions
from variable_batch_size.numbers import Numbers
from variable_batch_size.position import Position
from variable_batch_size.proxy import OptimizerProxy
from variable_batch_size.sampler import CustomSampler
from variable_batch_size.scaling import Scaling
from variable_batch_size.update import Attached, Update
from xla_replica import Replica, ReplicaError

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
        self._known: set[nn.Parameter] = set()
        self._num_minibatches_seen = 0
        self._last_lr: tuple[Any, ...] = self.get_lr()
        self._numbers = Numbers(self.replica)
        self._scaling = Scaling(self.rule, self.replica, self._numbers)
        self._agreement = Agreement(self.replica, self._numbers)
        self._watch = HyperparameterWatch()
        self._position = Position(sampler.plan, sampler.rank, announced=False)
        self._gradients = GradientBuffers(self.replica)
        self.noise = self._make_meter(noise)
        self._attached = Attached(self.noise)
        self._take_in(self._parameters())

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
        if closure is not None:
            raise TypeError(
                "step(closure) is not supported: call loss.backward() before step()"
            )
        if getattr(self, "found_inf", None) is not None:
            raise TypeError(
                "GradScaler is not supported: it would unscale gradients that are "
                "accumulated, on each replica by itself. Train in bfloat16, which "
                "needs no scaling"
            )
        self._follow_sampler()
        if self._position.substep == 0:
            self._refresh_gradients(behind_backward=True)
        else:
            self._gradients.check_unchanged(self._parameters())
        if self.noise:
            self.noise.drop_discarded()
        self._gradients.adopt(self._position.substep)
        self._watch.check(self.param_groups, self._position, self.replica)
        if self.noise:
            self.noise.end_minibatch()
        self._num_minibatches_seen += 1
        is_last = self._position.count_minibatch()
        self.replica.sync()  # the minibatch graph ends here, on every replica alike
        if not is_last:
            self._watch.remember(self.param_groups)
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
        before = self._position
        if before.announced and before.plan.epoch == epoch:
            if not before.begun:
                return 0  # a second call: idle steps are joined already
            self._refuse_to_repeat(before)
        plan = self.sampler.schedule.plan(epoch, self.sampler.num_replicas)
        if before.begun and not before.ended:
            self._abandon(before)
        self._position = Position(plan, self.sampler.rank, announced=True)
        self._refresh_gradients()
        self._watch.remember(self.param_groups)
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
        `variable_batch_size.buffers` for what it cannot restore.

        Raises:
            ReplicaError: Replicas have used different hyperparameters; on an
                accelerator this is where it is found.
        """
        self._agreement.check()
        average_buffers(model, self._num_minibatches_seen, self.replica)
        self._num_minibatches_seen = 0

    # --- what can be asked ----------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self._position.plan.epoch

    def get_bs(self) -> int:
        """Global batch size of the step under way; 0 at the end of the epoch."""
        return self._position.batch_size

    def get_lr(self) -> tuple[float, ...]:
        """The reference learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self.param_groups)

    def set_lr(self, values: tuple[float, ...]) -> None:
        """Sets the reference learning rate of each parameter group."""
        if len(values) != len(self.param_groups):
            raise ValueError(
                f"set_lr needs one learning rate for each of "
                f"{len(self.param_groups)} parameter groups, got {values!r}"
            )
        for group, value in zip(self.param_groups, values):
            group["lr"] = value

    def current_lr(self) -> float:
        """The effective learning rate of the step under way, of the first group.

        At the end of an epoch: that of its last update.
        """
        return self._current_lrs()[0]

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, with reference learning rates, and under
        ``"elastic"`` what rule, noise meter and attached schedulers have counted.

        It loads into a plain torch optimizer too, and does not depend on the number of
        replicas.
        """
        elastic = {
            "rule": self.rule.name,
            "ref_batchsize": self.ref_batchsize,
            "scaling": self._scaling.state_dict(),
            "noise": self.noise.state_dict() if self.noise else None,
            "schedules": self._attached.state_dict(),
        }
        return {**super().state_dict(), "elastic": elastic}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, or the state of a plain torch optimizer.

        Schedulers may be attached before or after, in the same order as they were.

        Raises:
            ValueError: It does not fit the parameter groups, or is of another rule.
        """
        elastic = state_dict.get("elastic", {})
        of_noise = elastic.get("noise") if self.noise else None
        self._check_state(elastic, of_noise)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "elastic"})
        self._scaling.load_state_dict(elastic.get("scaling", []))
        if of_noise:
            self.noise.load_state_dict(of_noise)
        self._attached.load_state_dict(elastic.get("schedules", []))

    def _check_state(self, elastic: dict[str, Any], of_noise: Any) -> None:
        """Before anything is touched."""
        if elastic.get("rule", self.rule.name) != self.rule.name:
            raise ValueError(
                f"the state is of rule {elastic['rule']!r}, and this optimizer has "
                f"{self.rule.name!r}; to change rules, load state['state'] and "
                "state['param_groups'] alone"
            )
        self._attached.check_state(elastic.get("schedules", []))
        if not of_noise:
            return
        if elastic["ref_batchsize"] != self.ref_batchsize:
            raise ValueError(
                f"the state's progress counts steps of {elastic['ref_batchsize']} "
                f"samples, and this optimizer's ref_batchsize={self.ref_batchsize}"
            )
        self.noise.check_state(of_noise)

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
        self._take_in(self.param_groups[-1]["params"])

    def _check_groups(self, groups: list[dict[str, Any]]) -> None:
        check_groups(groups, self.replica)
        check_rule(groups, self.rule, self.sampler.schedule, self.ref_batchsize)

    # --- before an update -----------------------------------------------------------

    def _take_in(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None  # of a backward pass before this optimizer's time
        self.replica.sync()  # what replicas have pending is no part of a collective
        self.replica.broadcast_([parameter.detach() for parameter in parameters])
        self._known.update(parameters)
        self._gradients.refresh(parameters)
        if self.noise:
            self.noise.watch(self.param_groups)

    def _refresh_gradients(self, behind_backward: bool = False) -> None:
        parameters = self._parameters()
        if not self._known.issuperset(parameters):
            raise ValueError(
                "a parameter group was added to the inner optimizer: add it through "
                "the wrapper's add_param_group, which makes it equal on all replicas"
            )
        changed = self._gradients.refresh(parameters, behind_backward)
        if changed and self.noise:
            self.noise.watch(self.param_groups, behind_backward)

    def _follow_sampler(self) -> None:
        before = self._position
        self._position = before.follow(self.sampler.plan)
        if self._position is not before:
            self._watch.allow_change()  # it may change between epochs

    def _refuse_to_repeat(self, position: Position) -> None:
        """A replica that idled all epoch takes the repetition for a second call."""
        if position.ended and self.replica.num_replicas > 1:
            raise ReplicaError(
                f"epoch {position.plan.epoch} has been trained; another pass needs "
                "another number, on several replicas",
                self.replica.rank,
            )

    def _abandon(self, position: Position) -> None:
        """Gives up the rest of an epoch, where no other replica relies on it."""
        left = (
            f"epoch {position.plan.epoch} is abandoned after {position.step} of "
            f"{position.plan.num_steps} steps"
        )
        if self.replica.num_replicas > 1:
            raise ReplicaError(
                f"{left}, and the other replicas would wait for this one: run every "
                "minibatch of the sampler; to train less, shorten the trace",
                self.replica.rank,
            )
        logger.warning(left)
        self._gradients.zero_()
        if self.noise:
            self.noise.end_step()

    # --- one update -----------------------------------------------------------------

    def _join_idle_steps(self) -> int:
        """Takes part in the steps in which this replica has no minibatch."""
        joined = 0
        while self._position.idle:
            self._refresh_gradients()
            self._gradients.rebind()
            self.replica.sync()  # what the user left pending is no part of the update
            self._update()
            joined += 1
        return joined

    def _update(self) -> None:
        """The update graph: the same on every replica, for every batch size."""
        # Changing numbers go to the device before the collective is traced.
        own = (*hyperparameters(self.param_groups), *self._scaling.state_dict())
        ballot = self._agreement.ballot(own)
        num_minibatches = self._position.num_minibatches
        divisor = self._numbers.get("divisor", num_minibatches)
        scaling = self._scaling.applied(self.inner, self._batch_ratio())
        noise, squares = self.noise, []
        if noise:
            squares = noise.begin_update(num_minibatches, self._position.batch_size)
        try:
            with torch.no_grad(), scaling as step:
                self._gradients.average_(divisor, ballot, *squares)
                self._agreement.count(ballot)
                factors = noise.update() if noise else None
                if self.max_grad_norm is not None:
                    self._gradients.clip_(self.max_grad_norm)
                lrs = step(factors if self.rule.measured else None)
        except BaseException:
            self._position.next_step()  # whatever became of this update
            raise
        finally:
            self._gradients.zero_()
            if noise:
                noise.end_step()
            self.replica.sync()
        self._finish_update(lrs)

    def _finish_update(self, lrs: tuple[Any, ...]) -> None:
        position = self._position
        update = Update(
            epoch=position.plan.epoch,
            step=position.plan.first_step + position.step,
            batch_size=position.batch_size,
            lr=lrs,
            idle=position.idle,
            ends_epoch=position.step + 1 == position.plan.num_steps,
        )
        position.next_step()
        self._last_lr = lrs
        self._opt_called = True  # what torch's schedulers look at before their step
        self._attached.run(update)
        self._refresh_gradients()  # they may have frozen or unfrozen parameters
        self._watch.remember(self.param_groups)
        if self.log_steps and update.step % self.log_steps == 0:
            self._log(update)

    def _log(self, update: Update) -> None:
        self._agreement.check()
        lrs = self._as_floats(update.lr)
        measured = self.noise.measure()._asdict() if self.noise else {}
        if self.replica.is_master:
            logger.info(
                "step %d: batch size %d, learning rate %s%s",
                update.step,
                update.batch_size,
                ", ".join(f"{lr:.6g}" for lr in lrs),
                "".join(
                    f", {k.replace('_', ' ')} {v:.6g}" for k, v in measured.items()
                ),
            )

    # --- small ones -----------------------------------------------------------------

    def _make_meter(self, noise: NoiseOptions | bool) -> NoiseMeter | None:
        if not isinstance(noise, (bool, NoiseOptions)):
            raise TypeError(f"noise must be a bool or NoiseOptions, got {noise!r}")
        if noise is False and not self.rule.measured:
            return None
        if self.ref_batchsize is None:
            raise TypeError("noise= needs ref_batchsize=, which gains compare with")
        return NoiseMeter(
            self.param_groups,
            self.sampler.minibatch_size,
            self.ref_batchsize,
            self.replica,
            self._numbers,
            noise if isinstance(noise, NoiseOptions) else NoiseOptions(),
        )

    def _batch_ratio(self) -> float:
        return self._position.batch_size / (self.ref_batchsize or 1)

    def _current_lrs(self) -> tuple[float, ...]:
        if self._position.ended:
            return self._as_floats(self._last_lr)
        if self.rule.measured:
            gains = self.noise.lr_factors(self._position.batch_size)
            factors = tuple(self.rule.lr_factor(gain) for gain in gains)
        else:
            factor = self.rule.lr_factor(self._batch_ratio())
            factors = (factor,) * len(self.param_groups)
        return tuple(lr * f for lr, f in zip(self.get_lr(), factors))

    def _as_floats(self, numbers: tuple[Any, ...]) -> tuple[float, ...]:
        """Reads those that are tensors, at once."""
        if any(isinstance(number, torch.Tensor) for number in numbers):
            return tuple(tensor.item() for tensor in self.replica.fetch(list(numbers)))
        return numbers

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]
