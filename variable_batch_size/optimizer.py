"""Optimizer wrappers that accumulate, sum over replicas and scale the learning rate."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

import xla_replica
from variable_batch_size.buffers import average_buffers
from variable_batch_size.lr_rules import rule_named
from variable_batch_size.sampler import CustomSampler
from variable_batch_size.schedule import EpochPlan
from variable_batch_size.tensor_scalars import TensorScalars
from xla_replica import Replica, ReplicaError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of the weights, as attached callbacks see it.

    Attributes:
        epoch: Epoch of the update.
        step: Steps since the beginning of training, from 0.
        batch_size: Global batch size, in samples.
        lr: Effective learning rate of each parameter group.
        idle: Whether this replica had no minibatch in the step.
    """

    epoch: int
    step: int
    batch_size: int
    lr: tuple[float, ...]
    idle: bool


def _of_inner(name: str) -> property:
    """An attribute of the wrapper that lives on the inner optimizer."""

    def get(self: ElasticOptimizer) -> Any:
        return getattr(self.inner, name)

    def set(self: ElasticOptimizer, value: Any) -> None:
        if not self._wrapping:  # torch's constructor begins with empty ones
            setattr(self.inner, name, value)

    return property(get, set)


class ElasticOptimizer(Optimizer):
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
    `attach`, which runs it for these updates too. A learning rate changed by hand
    between two updates of an epoch with idle replicas raises `ReplicaError`, because
    replicas would use different ones.

    Gradients are allocated at construction and zeroed in place; `zero_grad` does
    nothing. A parameter that took no part in the loss has a gradient of zero, not None.

    Construction is collective: parameters are made equal to those of replica 0.

    Args:
        optimizer: The optimizer to wrap, built after the model was moved to its device.
        sampler: The sampler that feeds this replica.
        rule: How the learning rate follows the batch; a key of ``lr_rules.RULES``.
        ref_batchsize: Batch size at which the reference learning rate was tuned.
        log_steps: Log step, batch size and learning rate every so many updates.
        max_grad_norm: Clip the summed and averaged gradient to this global norm.
        replica: Default: the one the caller runs in.

    Raises:
        ValueError, TypeError: An argument is out of range or of the wrong type.
    """

    param_groups = _of_inner("param_groups")
    state = _of_inner("state")
    defaults = _of_inner("defaults")

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        rule: str = "linear",
        ref_batchsize: int | None = None,
        log_steps: int | None = None,
        *,
        max_grad_norm: float | None = None,
        replica: Replica | None = None,
    ) -> None:
        self._wrapping = True
        self.inner = optimizer
        self.sampler = sampler
        self.replica = xla_replica.current() if replica is None else replica
        self.rule = rule_named(rule)
        self.ref_batchsize = ref_batchsize
        self.log_steps = log_steps
        self.max_grad_norm = max_grad_norm
        self._check_arguments()
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._wrapping = False
        self._attached: list[Callable[[Update], Any]] = []
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._num_minibatches_seen = 0
        self._last_lr: tuple[float, ...] = ()
        self.replica.broadcast_([p.detach() for p in self._parameters()])
        self._allocate_gradients()
        self._begin(sampler.plan, announced=False)

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
        self._follow_sampler()
        self._adopt_gradients()
        self._substep += 1
        self._num_minibatches_seen += 1
        self.replica.sync()  # the minibatch graph ends here, on every replica alike
        if self._substep < self._num_substeps[self._step]:
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
        """
        plan = self.sampler.schedule.plan(epoch, self.sampler.num_replicas)
        if self._substep or 0 < self._step < self._plan.num_steps:
            logger.warning(
                "epoch %d is abandoned after %d of %d steps",
                self._plan.epoch,
                self._step,
                self._plan.num_steps,
            )
            self._zero_gradients()
        self._begin(plan, announced=True)
        return self._join_idle_steps()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients are zeroed, in place, after every update."""
        del set_to_none

    def attach(self, target: Any) -> None:
        """Runs ``target`` after every update on this replica, idle or not.

        Args:
            target: A torch LR scheduler, which is stepped; or a function that takes an
                `Update`.

        Raises:
            TypeError: It is neither, or a scheduler whose step needs a metric.
        """
        if isinstance(target, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "attach: ReduceLROnPlateau needs a metric; step it at the end of an "
                "epoch, or attach a function that does"
            )
        if hasattr(target, "get_last_lr"):
            self._attached.append(lambda update: target.step())
        elif callable(target):
            self._attached.append(target)
        else:
            raise TypeError(
                f"attach: {target!r} is neither an LR scheduler nor a function"
            )

    def average_buffers(self, model: nn.Module) -> None:
        """Makes the model's floating-point buffers equal on all replicas.

        Each replica weighs as many samples as it has seen since the last call. Call it
        on every replica before evaluation and before a checkpoint: BatchNorm's running
        statistics drift apart, because replicas see different minibatches and
        different numbers of them. What it costs is two sums over the buffers. See
        `variable_batch_size.buffers` for what it cannot restore.
        """
        average_buffers(model, self._num_minibatches_seen, self.replica)
        self._num_minibatches_seen = 0

    # --- what can be asked ----------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self._plan.epoch

    def get_bs(self) -> int:
        """Global batch size of the step under way; 0 at the end of the epoch."""
        if self._step >= self._plan.num_steps:
            return 0
        return self._plan.batch_size(self._step)

    def get_lr(self) -> tuple[float, ...]:
        """The reference learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self.param_groups)

    def set_lr(self, values: tuple[float, ...]) -> None:
        """Sets the reference learning rate of each parameter group."""
        for group, value in zip(self.param_groups, values, strict=True):
            group["lr"] = value

    def current_lr(self) -> float | tuple[float, ...]:
        """The effective learning rate of the step under way, of the first group.

        At the end of an epoch: that of its last update.
        """
        lrs = self._effective_lrs() if self.get_bs() else self._last_lr
        return lrs[0] if lrs else self.get_lr()[0]

    # --- torch's optimizer protocol, passed on to the inner optimizer ---------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if any(param_group is group for group in self.param_groups):
            return  # torch's constructor introduces the inner optimizer's own groups
        self.inner.add_param_group(param_group)
        if not self._wrapping:
            self._allocate_gradients()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, with reference learning rates."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.inner.register_step_post_hook(hook)

    def _patch_step_function(self) -> None:
        # Torch would run global step hooks around every call of step(), also those
        # that only accumulate; the inner optimizer runs them once an update.
        self._zero_grad_profile_name = f"Optimizer.zero_grad#{type(self).__name__}"

    # --- position in the plan -------------------------------------------------------

    def _begin(self, plan: EpochPlan, announced: bool) -> None:
        self._plan = plan
        self._num_substeps = plan.num_substeps(self.sampler.rank)
        self._step = 0
        self._substep = 0
        self._announced = announced
        self._seen_hyperparameters: tuple[Any, ...] | None = None

    def _follow_sampler(self) -> None:
        """Moves on to the sampler's epoch, or says why it cannot."""
        epoch, ended = self.sampler.epoch, self._step >= self._plan.num_steps
        if epoch != self._plan.epoch:
            under_way = (self._step, self._substep) != (0, 0) or self._announced
            if under_way and not ended:
                raise ValueError(
                    f"the optimizer is at step {self._step} of epoch "
                    f"{self._plan.epoch} and the sampler at epoch {epoch}: call "
                    "set_epoch on both before every epoch"
                )
            self._begin(self.sampler.plan, announced=False)
        elif ended:
            raise ValueError(
                f"step() after the last of the {self._plan.num_steps} steps of epoch "
                f"{self._plan.epoch}: call set_epoch({self._plan.epoch + 1}) on sampler "
                "and optimizer, and step() once per minibatch of the sampler"
            )
        if not self._announced:
            self._check_first_step()
            self._announced = True

    def _check_first_step(self) -> None:
        plan = self._plan
        if plan.num_steps and plan.num_minibatches[0] < plan.num_replicas:
            raise ReplicaError(
                f"epoch {plan.epoch} begins with a step of {plan.num_minibatches[0]} "
                f"minibatches on {plan.num_replicas} replicas: call "
                f"optimizer.set_epoch({plan.epoch}) before iterating, where idle "
                "replicas join that step before their first forward pass",
                self.replica.rank,
            )

    def _join_idle_steps(self) -> int:
        """Takes part in the steps in which this replica has no minibatch."""
        joined = 0
        while self._step < self._plan.num_steps and self._num_substeps[self._step] == 0:
            self.replica.sync()  # whatever the user left pending stays out of the update
            self._update()
            joined += 1
        return joined

    # --- one update -----------------------------------------------------------------

    def _update(self) -> None:
        """The update graph: the same on every replica, for every batch size."""
        self._check_hyperparameters()
        lrs = self._effective_lrs()
        num_minibatches = int(self._plan.num_minibatches[self._step])
        # Changing numbers go to the device before the collective is traced.
        divisor = self.replica.scalar(num_minibatches)
        with torch.no_grad(), self._scaled_groups() as gradient_factor:
            gradients = list(self._gradients.values())
            self.replica.sum_(gradients)
            for gradient in gradients:
                gradient.div_(divisor)
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters(), self.max_grad_norm)
            if gradient_factor is not None:
                self._scale_gradients(gradient_factor)
            with TensorScalars() if self.replica.compiles else contextlib.nullcontext():
                self.inner.step()
        self._zero_gradients()
        self.replica.sync()
        self._finish_update(lrs, num_minibatches)

    def _finish_update(self, lrs: tuple[float, ...], num_minibatches: int) -> None:
        update = Update(
            epoch=self._plan.epoch,
            step=self._plan.first_step + self._step,
            batch_size=num_minibatches * self._plan.minibatch_size,
            lr=lrs,
            idle=self._num_substeps[self._step] == 0,
        )
        self._last_lr = lrs
        self._step += 1
        self._substep = 0
        self._opt_called = True  # what torch's schedulers look at before their step
        for callback in self._attached:
            callback(update)
        self._seen_hyperparameters = self._hyperparameters()
        if (
            self.log_steps
            and update.step % self.log_steps == 0
            and self.replica.is_master
        ):
            logger.info(
                "step %d: batch size %d, learning rate %s",
                update.step,
                update.batch_size,
                ", ".join(f"{lr:.6g}" for lr in lrs),
            )

    def _batch_ratio(self) -> float:
        batch_size = self._plan.batch_size(self._step)
        return batch_size / (self.ref_batchsize or batch_size)

    def _effective_lrs(self) -> tuple[float, ...]:
        factor = self.rule.effective_lr_factor(self._batch_ratio())
        return tuple(lr * factor for lr in self.get_lr())

    @contextlib.contextmanager
    def _scaled_groups(self) -> Iterator[torch.Tensor | None]:
        """Scaled learning rates stand in ``param_groups`` inside; always restored.

        Yields what multiplies the gradient, for rules that scale it.
        """
        ratio = self._batch_ratio()
        lr_factor, before = self.rule.lr_factor(ratio), []
        factor = None
        if self.rule.gradient_factor is not None:
            factor = self.replica.scalar(self.rule.gradient_factor(ratio), _dtype(self))
        try:
            for group in self.param_groups:
                scaled = ("lr", "weight_decay", "foreach")
                before.append((group, {k: group[k] for k in scaled if k in group}))
                group["lr"] = self._lr_value(group, group["lr"] * lr_factor)
                if self.replica.compiles and group.get("foreach"):
                    group["foreach"] = False  # reads a tensor learning rate back
            yield factor
        finally:
            for group, values in before:
                group.update(values)

    def _lr_value(self, group: dict[str, Any], lr: float) -> float | torch.Tensor:
        if not self.replica.compiles:
            return lr
        return self.replica.scalar(lr, _widest(group["params"]))

    def _scale_gradients(self, factor: torch.Tensor) -> None:
        """gradient = factor * (gradient + weight_decay * weight), decay then done."""
        for group in self.param_groups:
            decay = group["weight_decay"]
            for parameter in group["params"]:
                if parameter not in self._gradients:
                    continue
                if decay:
                    sign = -1 if group["maximize"] else 1
                    parameter.grad.add_(parameter, alpha=sign * decay)
                parameter.grad.mul_(factor)
            group["weight_decay"] = 0.0  # put back by _scaled_groups

    # --- gradients ------------------------------------------------------------------

    def _parameters(self) -> list[nn.Parameter]:
        return [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def _allocate_gradients(self) -> None:
        for parameter in self._parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._gradients[parameter] = parameter.grad
        self.replica.sync()

    def _zero_gradients(self) -> None:
        with torch.no_grad():
            for gradient in self._gradients.values():
                gradient.zero_()

    def _adopt_gradients(self) -> None:
        """Takes back gradients that ``model.zero_grad()`` has detached."""
        for parameter, gradient in self._gradients.items():
            if parameter.grad is gradient:
                continue
            if self._substep:
                raise ValueError(
                    "gradients were replaced while this step accumulates them, so its "
                    f"first {self._substep} minibatches would be lost: remove "
                    "model.zero_grad() from the training loop; the optimizer zeroes "
                    "gradients itself"
                )
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad.detach())
            parameter.grad = gradient

    # --- checks ---------------------------------------------------------------------

    def _check_arguments(self) -> None:
        if not isinstance(self.inner, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {self.inner!r}"
            )
        if isinstance(self.inner, torch.optim.LBFGS):
            raise TypeError("LBFGS evaluates the loss inside step(): not supported")
        if not isinstance(self.sampler, CustomSampler):
            raise TypeError(f"sampler must be a CustomSampler, got {self.sampler!r}")
        ref = self.ref_batchsize
        if ref is None and self.rule.name != "constant":
            raise TypeError(
                f"rule {self.rule.name!r} needs ref_batchsize=, the batch size at which "
                "the learning rate was tuned"
            )
        for name, value in (
            ("ref_batchsize", ref),
            ("log_steps", self.log_steps),
            ("max_grad_norm", self.max_grad_norm),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value!r}")
        if self.rule.gradient_factor and not isinstance(self.inner, SGD):
            raise TypeError(
                f"rule {self.rule.name!r} scales the gradient, which only SGD turns "
                f"into a scaled step; {type(self.inner).__name__} needs another rule"
            )
        place = (self.sampler.rank, self.sampler.num_replicas)
        if place != (self.replica.rank, self.replica.num_replicas):
            raise ValueError(
                f"the sampler deals to replica {place[0]} of {place[1]}, but this is "
                f"{self.replica}"
            )
        if any(isinstance(g["lr"], torch.Tensor) for g in self.inner.param_groups):
            raise TypeError(
                "the reference learning rate must be a number, not a tensor, which "
                "every step would read back; the wrapper brings it to the device itself"
            )
        for parameter in (p for g in self.inner.param_groups for p in g["params"]):
            if parameter.device.type != self.replica.device.type:
                raise ValueError(
                    f"a parameter is on {parameter.device}, but this is {self.replica}: "
                    "move the model with model.to(replica.device) before you build the "
                    "optimizer, or pass replica=xla_replica.LocalReplica('cpu')"
                )

    def _hyperparameters(self) -> tuple[Any, ...]:
        return tuple(
            (name, value)
            for group in self.param_groups
            for name, value in group.items()
            if isinstance(value, (int, float, tuple))
        )

    def _check_hyperparameters(self) -> None:
        """Raises if the learning rate changed where idle replicas cannot see it."""
        before = self._seen_hyperparameters
        if before is None or not self._plan.has_idle_replicas:
            return
        if before != self._hyperparameters():
            raise ReplicaError(
                "the learning rate or another hyperparameter changed between two "
                f"updates of epoch {self._plan.epoch}, in which some replicas are idle "
                "and join updates without running your code, so replicas would use "
                "different values: call optimizer.attach(scheduler) once in place of "
                "scheduler.step() in the loop, or change it between epochs",
                self.replica.rank,
            )


def _widest(parameters: list[nn.Parameter]) -> torch.dtype:
    """float64 where a parameter is, else float32: the precision numbers need."""
    wide = any(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if wide else torch.float32


def _dtype(optimizer: Optimizer) -> torch.dtype:
    return _widest([p for group in optimizer.param_groups for p in group["params"]])
