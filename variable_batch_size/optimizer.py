"""Optimizer wrappers that accumulate, sum over replicas and scale the learning rate."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import xla_replica
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.device_scalars import DeviceScalars, as_floats, dtype_for
from variable_batch_size.gradient_noise.meter import NoiseOptions, meter_for
from variable_batch_size.proxy import OptimizerProxy
from variable_batch_size.rules.rule import Rule, with_options
from variable_batch_size.rules.scaling import Scaling
from variable_batch_size.step import checks
from variable_batch_size.step.agreement import (
    Agreement,
    hyperparameters,
    settings_in_common,
)
from variable_batch_size.step.attached import Attached, Update, log_line
from variable_batch_size.step.buffers import average_buffers
from variable_batch_size.step.elastic_state import ElasticState
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.step_counter import StepCounter
from variable_batch_size.step.weights import SampleMask, StepWeight, is_zero
from xla_replica import Replica, ReplicaError
from xla_replica.common.arguments import check_flag

logger = logging.getLogger(__name__)


class ElasticOptimizer(OptimizerProxy):
    """Wraps a torch optimizer so that its global batch size follows a trace.

    Call `step` after every ``loss.backward()``. It accumulates until this replica has
    run its minibatches of the step, then sums gradients over replicas, divides by the
    step's number of minibatches, scales the learning rate and updates. The loss must
    be the mean over the minibatch; or, with ``reduction='sum'``, the sum over its
    tokens, whose number `step` takes.

    ``param_groups`` holds the reference learning rate, and the scaled one only while
    the inner optimizer runs. torch's LR schedulers and step hooks work on the wrapper
    and on the inner optimizer alike; step hooks run once an update, around the inner
    optimizer, when gradients are already summed.

    **Idle replicas.** A replica without a minibatch in a step runs no forward pass and
    adds nothing. It joins the update inside its previous `step` call, or in `set_epoch`
    where the epoch begins with such steps. `step` therefore returns how many updates it
    made, and whatever must happen once per update (an LR scheduler, a log) belongs into
    `attach`, which runs it for these updates too. With ``lockstep`` such a replica
    calls `join_step` instead, and loop bodies run once per update on every replica.
    Replicas that use different learning rates raise `ReplicaError`: at once where the
    cause is seen or reading is free, else in `average_buffers` and on logging steps.

    **Sharded models** (FSDP2's ``fully_shard``, before this is built): every replica
    must run every pass, so none is idle. One that has no minibatch left in a step runs
    padding, whose gradient and weight are zero; see `is_padding`. `set_epoch` must be
    called before every epoch.

    Gradients are allocated at construction and zeroed in place; `zero_grad` does
    nothing. A parameter that took no part in the loss has a gradient of zero, not None.

    Construction is collective: settings are compared, and parameters are made equal to
    those of replica 0.

    Args:
        optimizer: The optimizer to wrap, built after the model was moved to its device.
        sampler: The sampler that feeds this replica.
        rule: How the learning rate follows the batch; a key of `RULES`,
            ``'power:ALPHA'``, or a `Rule`.
        ref_batchsize: Batch size at which the reference learning rate was tuned.
        log_steps: Log step, batch size and learning rate every so many updates.
        reduction: What the loss is of its minibatch. ``'mean'``: the mean, and every
            minibatch counts the same. ``'sum'``: the sum over tokens, or whatever else
            minibatches have different numbers of. Call ``step(weight=num_tokens)``; the
            step's gradient is the sum of the minibatches' over the sum of their
            weights, over replicas and substeps.
        ref_weight: In place of ``ref_batchsize``, with ``reduction='sum'``: the weight
            (tokens) of a step at which the learning rate was tuned. The rule then
            follows each step's weight instead of its number of samples.
        max_grad_norm: Clip the summed and averaged gradient to this global norm. It
            takes the place of ``clip_grad_norm_`` in the loop, which would clip the
            gradient of a part of the step.
        momentum_correction: For SGD: apply the rule's factor to the gradient, inside
            the momentum buffer; see `Rule`.
        decay_per_sample: Scale weight decay so that weights decay by the same amount
            per sample whatever the rule: for SGD and AdamW; see `Rule`.
        noise: Measure gradient noise, with these options or, if True, the default ones;
            `noise` then answers. AdaScale always does.
        overlap: Sum gradients over replicas while the step's last backward pass still
            computes others, where replicas are processes.
        lockstep: A replica without a minibatch in a step joins its update in
            `join_step`, which the caller then calls, and nowhere else. What is between
            two updates in the loop, such as collectives and schedulers, then runs
            equally often on every replica. `set_epoch` must be called before every
            epoch.
        replica: Default: the one the caller runs in.

    Attributes:
        grad_norm: With ``max_grad_norm``: the global norm of the last update's gradient
            before it was clipped, a tensor of shape ``()``; None before the first.

    Raises:
        ValueError, TypeError: An argument is out of range or of the wrong type.
        ReplicaError: Replicas have other samplers, rules or models.
    """

    # For code that would skip a step: `step` must be called after every backward pass.
    steps_by_itself = True

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        rule: str | Rule = "linear",
        ref_batchsize: int | None = None,
        log_steps: int | None = None,
        *,
        reduction: str = "mean",
        ref_weight: float | None = None,
        max_grad_norm: float | None = None,
        momentum_correction: bool = False,
        decay_per_sample: bool = False,
        noise: NoiseOptions | bool = False,
        overlap: bool = True,
        lockstep: bool = False,
        replica: Replica | None = None,
    ) -> None:
        self.sampler = sampler
        self.replica = xla_replica.current() if replica is None else replica
        self.rule = with_options(rule, momentum_correction, decay_per_sample)
        self.ref_batchsize = ref_batchsize
        self.reduction = reduction
        self.ref_weight = ref_weight
        self.log_steps = log_steps
        self.max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        self._lockstep = check_flag("lockstep", lockstep)
        checks.check_optimizer(optimizer, self.rule)
        checks.check_sampler(sampler, self.replica)
        checks.check_reduction(
            reduction, ref_weight, ref_batchsize, self.rule, sampler.schedule
        )
        checks.check_numbers(
            self.rule,
            ref_batchsize if ref_weight is None else ref_weight,
            log_steps=log_steps,
            max_grad_norm=max_grad_norm,
        )
        self._check_groups(optimizer.param_groups)
        groups = optimizer.param_groups
        self._sharded = self.replica.is_sharded(
            [p for g in groups for p in g["params"]]
        )
        if self._sharded:
            sampler.pad_steps()
        if ref_weight is None and not self.rule.measured:
            sampler.follow_rule(self.rule.lr_factor, ref_batchsize or 1)
        super().__init__(optimizer)
        self._scalars = DeviceScalars(self.replica)
        self._scaling = Scaling(
            self.rule, self.replica, self._scalars, late_ratio=ref_weight is not None
        )
        self._weight = None
        if reduction == "sum":
            groups = optimizer.param_groups
            dtype = dtype_for(p for group in groups for p in group["params"])
            self._weight = StepWeight(self.replica, dtype)
        self._agreement = Agreement(self.replica, self._scalars, self._lockstep)
        weighted = reduction == "sum"
        self.noise = meter_for(
            noise,
            self.rule.measured,
            optimizer.param_groups,
            None if weighted else sampler.minibatch_size,
            ref_weight if weighted else ref_batchsize,
            self.replica,
            self._scalars,
        )
        self._attached = Attached(self.noise)
        self._saved = ElasticState(
            self.rule, ref_batchsize, self._scaling, self.noise, self._attached, sampler
        )
        self.replica.check_agreement(
            "the settings of the run",
            settings_in_common(
                sampler,
                self.rule,
                optimizer.param_groups,
                ref_batchsize=ref_batchsize,
                reduction=reduction,
                ref_weight=ref_weight,
                max_grad_norm=max_grad_norm,
                noise=self.noise.options if self.noise else None,
                lockstep=self._lockstep,
            ),
            "Each would train another model: build sampler, model and optimizer alike "
            "on every replica, without the rank in seeds, files or conditions.",
        )
        self._gradients = StepGradients(optimizer, self.replica, self.noise, overlap)
        self._counter = StepCounter(sampler.plan, self.replica.rank, announced=False)
        self._expect()
        self._num_minibatches_seen = 0  # since buffers were averaged
        self._num_minibatches = 0  # of all epochs
        self._last_lr: tuple[Any, ...] = self.get_lr()
        self._mask = SampleMask(sampler.minibatch_size, self.replica, self._scalars)

    # --- the training loop's calls --------------------------------------------------

    def step(  # type: ignore[override]
        self, closure: None = None, *, weight: Any = None
    ) -> int:
        """Accumulates one minibatch's gradient, and updates if it was the step's last.

        Args:
            closure: Not supported.
            weight: With ``reduction='sum'``: how many tokens the minibatch's loss sums,
                at least 0; a number, or a tensor with one element, which is not read.
                A minibatch of weight zero adds nothing if its loss is zero.

        Returns:
            The number of updates made: 0 while accumulating; 1 for an update; more if
            this replica is idle in the steps that follow, which it joins at once.

        Raises:
            ValueError: The epoch has no such step: `set_epoch` was forgotten, or the
                loop ran more minibatches than the sampler yields.
            ReplicaError: Replicas would disagree from here on.
        """
        if closure is not None:
            raise TypeError(
                "step(closure) is not supported: call loss.backward() before step()"
            )
        checks.check_not_compiled()
        if getattr(self, "found_inf", None) is not None:  # left by torch's GradScaler
            raise TypeError(
                "GradScaler is not supported: it would unscale gradients that are "
                "accumulated, on each replica separately. Train in bfloat16, which "
                "needs no scaling"
            )
        on_device = self._checked_weight(weight)
        if not self._end_minibatch(on_device, needs_backward=not is_zero(weight)):
            self._expect()
            return 0
        self._update()
        return 1 + self._join_idle_steps()

    def join_step(self) -> int:
        """Takes part in a step in which this replica has no minibatch; returns 1.

        With ``lockstep``, in place of the step's minibatches.

        Raises:
            ValueError: It has minibatches in the step, or there is no ``lockstep``.
        """
        if not (self._lockstep and self.is_idle):
            raise ValueError(
                f"join_step() in step {self._counter.cursor.step} of epoch {self.epoch}"
                f", with lockstep={self._lockstep}: it is for wrappers with "
                "lockstep=True, in steps in which this replica has no minibatch; "
                "call backward() and step() for every one that it has"
            )
        return self._join_idle_step()

    def set_epoch(self, epoch: int) -> int:
        """Begins an epoch; call it, like the sampler's, before iterating.

        Returns:
            The number of updates made: those of the steps at the beginning of the
            epoch in which this replica is idle.

        Raises:
            TraceExhausted: The trace has ended and ``on_end='error'``.
            ReplicaError: The epoch under way has steps left, which other replicas take.
        """
        counter = self._counter
        if counter.announced and counter.plan.epoch == epoch:
            if not counter.begun:
                return 0  # a second call: idle steps are joined already
            if counter.ended and self.replica.num_replicas > 1:
                # One that idled all epoch takes the repetition for a second call.
                raise ReplicaError(
                    f"epoch {epoch} has been trained; another pass needs another "
                    "number, on several replicas",
                    self.replica.rank,
                )
        plan = self.sampler.plan_of(epoch)
        if counter.begun and not counter.ended:
            left = (
                f"epoch {counter.plan.epoch} is abandoned after {counter.cursor.step} "
                f"of {counter.plan.num_steps} steps"
            )
            if self.replica.num_replicas > 1:
                raise ReplicaError(
                    f"{left}, and the other replicas would wait for this one: run "
                    "every minibatch of the sampler; to train less, shorten the trace",
                    self.replica.rank,
                )
            logger.warning(left)
            self._discard()
        self._counter = StepCounter(plan, self.replica.rank, announced=True)
        self._gradients.refresh()
        self._agreement.remember(self.param_groups)
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
            TypeError: ``target`` is neither, or a scheduler whose step needs a metric,
                or a function with a unit; or iterations are not measured.
            ValueError: ``unit`` or ``every`` is not allowed.
            ReplicaError: This replica has joined updates of the epoch, and other
                replicas have not made them yet: attach before `set_epoch`.
        """
        self._counter.check_attach()
        self._attached.add(target, unit, every)

    def change_batch_size(self, batch_size: int) -> int:
        """Changes the global batch size of all steps that nobody has begun. Collective.

        Call it inside `attach`, where replicas have made the same updates, and with
        the same number on each. The sampler must have ``on_end='hold'``. Steps whose
        minibatches a loader has fetched on some replica keep their size, and so does
        the step after the present one; nothing is compiled. The change is part of the
        sampler's state, and `Schedule.thresholds` gives the whole trace.

        Returns:
            The first step with the new size, since training began.

        Raises:
            ValueError: The size does not fit the sampler or the rule; see
                `Schedule.changed`.
            ReplicaError: Replicas have brought different sizes.
        """
        sampler, counter = self.sampler, self._counter
        with sampler.dealing_paused() as dealt:
            # The step after this one is looked at: it begins an epoch, or does not.
            next_step = counter.plan.first_step + counter.cursor.step
            told = self.replica.all_gather_object((batch_size, max(dealt, next_step)))
            sizes = [size for size, _ in told]
            if any(size != sizes[0] for size in sizes):
                raise ReplicaError(
                    f"replicas have asked for different batch sizes, {sizes}: decide "
                    "from numbers that are equal on all of them, or on one replica",
                    self.replica.rank,
                )
            first = 1 + max(step for _, step in told)
            new = sampler.schedule.changed(first, batch_size)
            self._check_groups(self.inner.param_groups, new)
            sampler.change_from(first, batch_size)
            counter.replan(sampler.replanned(counter.plan))
        return first

    def average_buffers(self, model: nn.Module) -> None:
        """Makes the model's floating-point buffers equal on all replicas.

        Each replica weighs as many samples as it has seen since the last call. Call it
        on every replica before evaluation and before a checkpoint: BatchNorm's running
        statistics drift apart. It costs two sums over the buffers. See
        `variable_batch_size.step.buffers` for what it cannot restore.

        Raises:
            ReplicaError: Replicas have used different hyperparameters; on an
                accelerator this is where it is found.
        """
        self._agreement.check()
        average_buffers(model, self._num_minibatches_seen, self.replica)
        self._num_minibatches_seen = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. Collective: its parameters become those of replica 0."""
        if self._wrapping:
            return
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        param_group = {**param_group, "params": params}
        unnamed = [p[1] if isinstance(p, tuple) else p for p in params]
        self._check_groups([{**self.defaults, **param_group, "params": unnamed}])
        if self.replica.is_sharded(unnamed) and not self._sharded:
            raise ValueError(
                "add_param_group: these parameters are sharded, and the wrapper was "
                "built with whole ones alone, whose replicas run different numbers of "
                "minibatches: build it with a sharded parameter too"
            )
        super().add_param_group(param_group)
        self._gradients.add(self.param_groups[-1]["params"])

    # --- what can be asked ----------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self._counter.plan.epoch

    @property
    def is_idle(self) -> bool:
        """Whether this replica has no minibatch in the step under way."""
        return self._counter.idle

    @property
    def is_padding(self) -> bool:
        """Whether the minibatch under way does not count, until `step` ends it.

        With sharded parameters every replica must run every pass, so one that has no
        minibatch left in a step runs one that another replica runs too. Its gradient
        and its weight are zero. Leave it out of metrics.
        """
        return self._counter.is_padding

    @property
    def sample_weights(self) -> torch.Tensor:
        """``(minibatch_size,)``: 1 for samples of this minibatch, 0 for its padding.

        With ``CustomSampler(pad_minibatches=True)`` the loss of a minibatch is
        ``(losses * optimizer.sample_weights).sum()``, and `step` knows how many samples
        count. It is data on the device, not read and not compiled anew.
        """
        counter = self._counter.follow(self.sampler.plan)
        return self._mask.weights(counter.num_real_samples)

    def get_bs(self) -> int:
        """Returns the global batch size of the step under way; 0 after the last."""
        return self._counter.batch_size

    def asked_to_stop(self, look: bool = False) -> bool:
        """Returns whether all replicas stop after the update that was made last.

        Ask inside `attach`, where all replicas have made the same updates, as
        `Checkpointer` does. They agree without a collective or, unless ``look``, a
        transfer of their own; see `Agreement.stop_agreed`.
        """
        return self._agreement.stop_agreed(look)

    def current_lr(self) -> float:
        """Returns the first group's effective learning rate in the step under way.

        At the end of an epoch, and with ``ref_weight``, where it depends on weights
        yet to come: that of the last update.
        """
        return self._current_lrs()[0]

    # --- what is saved --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner optimizer's state, with reference learning rates.

        Under ``"elastic"`` it holds the sampler's state, and what rule, noise meter and
        attached schedulers have counted. It is the state after the last update:
        minibatches accumulated since are not in it, and are run again when it is
        loaded. It loads into a plain torch optimizer too, and does not depend on the
        number of replicas. Reads the device if noise is measured.
        """
        return {**super().state_dict(), "elastic": self._saved.state_dict()}

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        *,
        place: bool = True,
        allow_changes: bool = False,
    ) -> None:
        """Loads what `state_dict` returned, or the state of a plain torch optimizer.

        The sampler is restored with it: begin the loop at ``sampler.epoch``.
        Schedulers may be attached before or after, in the same order as they were.

        Args:
            state_dict: On every replica.
            place: Continue at the saved epoch and step. If False, only weights' states,
                schedulers and measurements are taken: for another training run.
            allow_changes: See `CustomSampler.load_state_dict`.

        Raises:
            ValueError: The state does not fit the parameter groups, or is of another
                rule or a run on other samples.
        """
        elastic = dict(state_dict.get("elastic", {}))
        if not place:
            elastic.pop("sampler", None)
        self._saved.check(elastic, allow_changes)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "elastic"})
        self._saved.load(elastic, allow_changes)
        if "sampler" not in elastic:
            return
        rank = self.replica.rank
        self._counter = StepCounter(self.sampler.plan, rank, announced=False)
        self._num_minibatches_seen = 0
        self._discard()  # of minibatches without an update
        self._expect()
        self._agreement.allow_change()

    # --- one minibatch, one update --------------------------------------------------

    def _checked_weight(self, weight: Any) -> torch.Tensor | None:
        """Returns the minibatch's weight on the device; None if all count the same."""
        if self._weight is None:
            if weight is not None:
                raise TypeError(
                    "step(weight=...) needs reduction='sum': build the optimizer with "
                    "it, and let the loss be the sum over tokens, not their mean"
                )
            return None
        if self.sampler.schedule.pad_minibatches:
            num_real = self._counter.follow(self.sampler.plan).num_real_samples
            self._mask.end_minibatch(num_real)
            weight = num_real if weight is None else weight
        if self.is_padding:
            weight = 0
        if weight is None:
            raise TypeError(
                "step() with reduction='sum' needs weight=, the number of tokens whose "
                "losses the minibatch's loss sums: optimizer.step(weight=num_tokens)"
            )
        return self._weight.on_device(weight)

    def _end_minibatch(self, weight: torch.Tensor | None, needs_backward: bool) -> bool:
        """Takes in a minibatch; returns whether an update is due after it."""
        counter = self._counter.follow(self.sampler.plan)
        if counter is not self._counter:
            self._agreement.allow_change()  # hyperparameters may change between epochs
        self._counter = counter
        checks.check_yielded(self.sampler, self._num_minibatches + 1)
        self._gradients.accept(counter.substep, weight, needs_backward)
        if self._weight is not None:
            self._weight.add(weight)
        self._agreement.check_unchanged(self.inner.param_groups, counter)
        self._num_minibatches_seen += not counter.is_padding
        self._num_minibatches += 1
        is_last = counter.count_minibatch()
        self.replica.sync()  # the minibatch graph ends here, on every replica alike
        if not is_last:
            self._agreement.remember(self.inner.param_groups)
        return is_last

    def _join_idle_steps(self) -> int:
        """Takes part in the steps in which this replica has no minibatch."""
        joined = 0
        self._expect()
        while self.is_idle and not self._lockstep:
            joined += self._join_idle_step()
        return joined

    def _join_idle_step(self) -> int:
        self._gradients.stand_in()
        self.replica.sync()  # keeps what the user left pending out of the update
        self._update()
        self._expect()
        return 1

    def _expect(self) -> None:
        """Says what the next minibatch is to the sum of the gradients."""
        counter = self._counter
        if counter.plan.padded != self._sharded:
            raise ValueError(
                "a wrapper of sharded parameters and one of whole ones share a "
                "sampler, but need different numbers of minibatches: give each its own"
            )
        self._gradients.expect(
            counter.substep == 0,
            counter.is_at_last,
            counter.num_minibatches,
            counter.num_minibatches if self._weight is None else None,
            not counter.is_padding,
        )

    def _update(self) -> None:
        """Makes the update of the step under way, and runs what is attached.

        If an exception ends the update, the step is lost and gradients are zero.
        """
        counter, plan = self._counter, self._counter.plan
        batch_size, step, idle = counter.batch_size, counter.cursor.step, counter.idle
        try:
            self._last_lr, weight = self._update_weights(
                counter.num_minibatches, batch_size
            )
        finally:
            counter.next_step()  # whatever became of this update
            self._discard()
            self.replica.sync()
        self._opt_called = True  # what torch's schedulers look at before their step
        self.sampler.commit(plan.epoch, step + 1)
        update = Update(
            epoch=plan.epoch,
            step=plan.first_step + step,
            batch_size=batch_size,
            minibatch_size=plan.minibatch_size,
            lr=self._last_lr,
            idle=idle,
            ends_epoch=step + 1 == plan.num_steps,
            weight=weight,
        )
        self._attached.run(update)
        self._gradients.refresh()  # callbacks may have frozen or unfrozen parameters
        self._agreement.remember(self.inner.param_groups)
        if self.log_steps and update.step % self.log_steps == 0:
            self._log(update)

    def _update_weights(
        self, num_minibatches: int, batch_size: int
    ) -> tuple[tuple[Any, ...], Any]:
        """Sums over replicas, divides, measures, clips, scales and steps.

        It is one program on every replica, for every batch size. Returns the effective
        learning rate of each parameter group, and the step's weight.
        """
        # Changing numbers go to the device before the collective is traced.
        groups = self.inner.param_groups
        used = (*hyperparameters(groups), *self._scaling.state_dict())
        order = self.sampler.order_digest(self._counter.plan.epoch)
        ballots = self._agreement.ballots(used, order)
        squares = []
        if self.noise:
            squares = self.noise.begin_update(num_minibatches, batch_size)
        weights = [] if self._weight is None else [self._weight.to_sum()]
        divisor: Any = num_minibatches if self._weight is None else None
        if divisor is not None and self.replica.is_lazy:
            divisor = self._scalars.get("divisor", num_minibatches)
        ratio = None if self.ref_weight else batch_size / (self.ref_batchsize or 1)
        with torch.no_grad():
            step = self._scaling.prepare(self.inner, ratio)
            self._gradients.sum_(ballots, *squares, *weights, divisor=divisor)
            self._agreement.count(ballots)
            total = None
            if self._weight is not None:
                total, divisor, ratio = self._weight.count(self.ref_weight)
                self._gradients.divide_(divisor)
            factors = self.noise.update(total) if self.noise else None
            if self.max_grad_norm is not None:
                self.grad_norm = self._gradients.clip_(self.max_grad_norm)
            with self.stepping():
                lrs = step(factors if self.rule.measured else None, ratio)
            return lrs, total

    def _discard(self) -> None:
        """Forgets what the step under way has accumulated."""
        self._gradients.discard()
        if self._weight is not None:
            self._weight.discard()

    # --- how ------------------------------------------------------------------------

    def _check_groups(
        self, groups: list[dict[str, Any]], schedule: Schedule | None = None
    ) -> None:
        checks.check_groups(groups, self.replica)
        checks.check_rule(
            groups,
            self.rule,
            schedule or self.sampler.schedule,
            self.ref_batchsize,
            late_ratio=self.ref_weight is not None,
        )

    def _current_lrs(self) -> tuple[float, ...]:
        """Returns the learning rates of the step under way, or of the last update."""
        if self._counter.ended or (self.ref_weight and not self.rule.measured):
            return as_floats(self._last_lr, self.replica)
        lrs, batch_size = self.get_lr(), self._counter.batch_size
        if self.rule.measured:
            inputs = self.noise.lr_factors(batch_size)
        else:
            inputs = (batch_size / (self.ref_batchsize or 1),) * len(lrs)
        return tuple(lr * self.rule.lr_factor(each) for lr, each in zip(lrs, inputs))

    def _log(self, update: Update) -> None:
        """Logs one line on replica 0; every replica reads its device."""
        self._agreement.check()
        line = log_line(update, self.noise, self.replica)
        if self.replica.is_primary:
            logger.info(line)
