"""Optimizer wrappers that accumulate, sum over replicas and scale the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

import xla_replica
from variable_batch_size import buffers
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Place
from variable_batch_size.device_scalars import as_floats
from variable_batch_size.live.exact import ExactModel
from variable_batch_size.live.members import LiveBallots, LiveUpdates, State
from variable_batch_size.live.repeatable import RepeatableSums
from variable_batch_size.part import Part
from variable_batch_size.proxy import OptimizerProxy
from variable_batch_size.rules.rule import Rule, with_options
from variable_batch_size.step import checks
from variable_batch_size.step.attached import Unit, check_attach
from variable_batch_size.step.course import Course, common_settings
from variable_batch_size.step.gradients import Sums
from variable_batch_size.step.parts import Ballots, Clipping, Weights
from variable_batch_size.step.run import ElasticOptions, Run
from variable_batch_size.step.scaling import Scaling
from variable_batch_size.step.together import update_together
from xla_replica import Replica, ReplicaError
from xla_replica.backends.registry import given_or_current

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _sums(exact: nn.Module | None, replica: Replica) -> Sums:
    """Returns how the minibatches of a step add up."""
    if exact is not None:
        return ExactModel(exact, replica)
    return RepeatableSums(replica) if replica.is_live else Sums()


def _setting(name: str) -> property:
    """Returns a setting of the wrapper, which cannot be assigned."""
    doc = f"The argument ``{name}``; it cannot be assigned."
    return property(lambda self: getattr(self._run, name), doc=doc)


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
    made, and whatever must happen once per update (an LR scheduler, a log) belongs in
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
        **options: By name, what follows here; what is switched is off by default, and
            None leaves an option out.
        reduction: What the loss is of its minibatch. ``'mean'``, the default: every
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
            computes others, where replicas are processes. Default: True.
        lockstep: A replica without a minibatch in a step joins its update in
            `join_step`, which the caller then calls, and nowhere else. What is between
            two updates in the loop, such as collectives and schedulers, then runs
            equally often on every replica. `set_epoch` must be called before every
            epoch.
        float32_sums: Add up the minibatches of a step in float32 where parameters have
            16 bits: 4 bytes for each of their numbers, and an addition in every
            minibatch (default). Else .grad adds up in 16 bits, off by 4 % after 512.
        shard_gradients: Where FSDP2 shards parameters, it sums the gradients of every
            minibatch, so that a replica holds its part of them alone (default). If
            False, whole gradients add up, with one communication in a step.
        exact: The model, whose weights then have the same bits on any number of
            replicas: gradients are summed as integers, random numbers belong to their
            minibatch, and running statistics move once a step. See
            docs/exact_sums.md for what it costs and what it refuses.
        compare_every: In a live run: compare the bits of members' weights every so many
            updates (100). A member that differs receives those of the others, once.
        replica: Default: the one the caller runs in.

    Attributes:
        updates: What makes the updates, for what saves a run or joins one.

    Raises:
        ValueError, TypeError: An argument is out of range or of the wrong type.
        ReplicaError: Replicas have other samplers, rules or models.
    """

    # For code that would skip a step: `step` must be called after every backward pass.
    steps_by_itself = True

    rule = _setting("rule")
    ref_batchsize = _setting("ref_batchsize")
    ref_weight = _setting("ref_weight")
    reduction = _setting("reduction")
    log_steps = _setting("log_steps")
    max_grad_norm = _setting("max_grad_norm")
    noise = _setting("noise")  # a `NoiseMeter`, or None

    def __init__(
        self,
        optimizer: Optimizer,
        sampler: CustomSampler,
        rule: str | Rule = "linear",
        ref_batchsize: int | None = None,
        log_steps: int | None = None,
        **options: Unpack[ElasticOptions],
    ) -> None:
        own: dict[str, Any] = {"ref_batchsize": ref_batchsize, **options}
        own["noise_options"] = own.pop("noise", False)
        self.sampler = sampler
        self.replica = replica = given_or_current(own.pop("replica", None))
        sums = _sums(own.pop("exact", None), replica)
        names = "momentum_correction", "decay_per_sample"
        rule = with_options(rule, **{name: own.pop(name, False) for name in names})
        of = optimizer, sampler, replica, sums, rule
        self._run = run = Run(*of, log_steps, **own)
        checks.check_run(run)
        ledger = sampler.ledger
        if run.sharded != ledger.padded and (ledger.padded or ledger.accounts):
            raise ValueError(
                "sharded and whole parameters share a sampler: give each one its own"
            )
        if run.sharded:
            ledger.pad()
        super().__init__(optimizer)
        replica.check_agreement(
            "the settings of the run",
            common_settings(run),
            "Each would train another model: build sampler, model and optimizer alike "
            "on every replica, without the rank in seeds, files or conditions.",
        )
        # What a step that may be run again adds up; the inner one is for who has it
        # alone.
        self.repeatable = run.sums if run.sums.keeps_buffers else None
        optimizer.repeatable = self.repeatable  # type: ignore[attr-defined]
        ride = getattr(sampler.order, "ride", None)
        if self.repeatable is not None and ride is not None:
            ride(self.repeatable)
        self.updates = self._built()
        self._starts = WeakTensorKeyDictionary()

    def _built(self) -> Course:
        """Returns what makes the updates, with the parts that this run has."""
        run, parts = self._run, dict[str, Part]()
        account = run.sums.account(run.sampler, id(run.parameters()[0]))
        gradients, scaling = run.sums.gradients(run), Scaling(run)
        is_live, weights = run.replica.is_live, None
        ballots, made = (LiveBallots, LiveUpdates) if is_live else (Ballots, Course)
        if run.replica.num_replicas > 1 or is_live:
            parts["ballots"] = ballots(run, gradients, scaling, parts)
        if self.repeatable is not None:
            parts["repeatable"] = self.repeatable
        if run.reduction == "sum":
            parts["weights"] = weights = Weights(run, gradients)
        if run.noise is not None:
            run.noise.weights, parts["noise"] = weights, run.noise
        if run.max_grad_norm is not None:
            parts["clipping"] = Clipping(run, gradients, run.max_grad_norm)
        return made(run, account, gradients, scaling, parts)

    # --- the training loop's calls --------------------------------------------------

    def step(  # type: ignore[override]
        self, closure: None = None, *, weight: Any = None
    ) -> int:
        """Accumulates one minibatch's gradient, and updates if it was the step's last.

        Args:
            closure: Not supported; Accelerate hands None on.
            weight: With ``reduction='sum'``: how many tokens the minibatch's loss sums,
                at least 0; a number, or a tensor with one element, which is not read.
                A minibatch of weight zero adds nothing if its loss is zero.

        Returns:
            The number of updates made: 0 while accumulating; 1 for an update; more if
            this replica is idle in the steps that follow, which it joins at once. Of
            several optimizers of one sampler all make their updates in the `step` of
            the last one, so that no loss of the step is of weights after it.

        Raises:
            ValueError: The epoch has no such step: `set_epoch` was forgotten, or the
                loop ran more minibatches than the sampler yields.
            ReplicaError: Replicas would disagree from here on.
        """
        if closure is not None:
            raise TypeError("step(closure) is not supported: call backward() before it")
        tracing = torch.compiler.is_dynamo_compiling()
        if tracing or callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()):
            raise TypeError(
                "torch.compile would compile step() for every learning rate: compile "
                "the forward pass alone, and call backward() and step() outside"
            )
        if getattr(self, "found_inf", None) is not None:  # left by torch's GradScaler
            raise TypeError(
                "GradScaler is not supported, as it unscales accumulated gradients: "
                "train in bfloat16, which needs no scaling"
            )
        if weight is not None and self._run.reduction == "mean":
            raise TypeError(
                "step(weight=...) needs reduction='sum': build the optimizer with it, "
                "and let the loss be the sum over tokens, not their mean"
            )
        return self.updates.end_minibatch(weight) + self._join_idle_steps()

    def join_step(self) -> int:
        """Takes part in a step in which this replica has no minibatch.

        Returns what `step` does. With ``lockstep``, in place of the step's minibatches.

        Raises:
            ValueError: It has minibatches in the step, or there is no ``lockstep``.
        """
        if not (self._run.lockstep and self.is_idle):
            raise ValueError(
                f"join_step() in step {self.place.step} of epoch {self.epoch}: it is "
                "for wrappers with lockstep=True, in steps without a minibatch here"
            )
        self._opt_called = True  # torch's schedulers look before their step
        return update_together(self.updates.account)

    def set_epoch(self, epoch: int) -> int:
        """Begins an epoch; call it, like the sampler's, before iterating.

        Returns:
            The number of updates made: those of the steps at the beginning of the
            epoch in which this replica is idle.

        Raises:
            ReplicaError: The epoch under way has steps left, which other replicas take.
        """
        self.updates.begin_epoch(epoch)
        return self._join_idle_steps()

    def _join_idle_steps(self) -> int:
        """Joins the steps that come next without a minibatch, unless in lockstep."""
        num_updates, account = 0, self.updates.account
        while account.idle and not self._run.lockstep:
            self._opt_called = True  # torch's schedulers look before their step
            if (num_optimizers := len(account.ledger.accounts)) > 1:
                raise ReplicaError(
                    f"this replica is idle in step {account.number}: build its "
                    f"{num_optimizers} optimizers with lockstep=True, call join_step()",
                    self.replica.rank,
                )
            num_updates += self.updates.update()
        return num_updates

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients are zeroed, in place, after every update.

        Raises ValueError between ``backward()`` and `step`, whose gradients count.
        """
        del set_to_none
        self.updates.gradients.refuse_zeroing()

    def attach(self, target: Any, unit: Unit = "updates", every: float = 1) -> None:
        """Runs ``target`` after every update on this replica, idle or not.

        With ``exact`` a step may be run again instead of its update: ``drop_step()`` is
        then called of the function, or the object whose method it is, if it has one.

        Args:
            target: A torch LR scheduler, whose ``step`` needs no metric; or a function
                that takes an `Update`.
            unit: What a scheduler counts: ``'updates'``, ``'samples'``, or
                ``'epochs'``, as for a `StepLR` of 30 epochs.
            every: A scheduler is stepped once every so many units.

        Raises:
            ValueError: ``unit`` or ``every`` is not allowed, as with a function; or
                ``target`` is attached already, or was built with another optimizer.
            ReplicaError: This replica has joined updates of the epoch, and other
                replicas have not made them yet: attach before `set_epoch`.
        """
        check_attach(self.updates.account)
        self.updates.attached.add(target, unit, every)

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
        sampler, account = self.sampler, self.updates.account
        with account.ledger.paused() as dealt:
            # The step after this one is looked at: it begins an epoch, or does not.
            latest = max(dealt, account.global_step)
            first: int = 1 + max(self.replica.all_gather_object(latest))
            what, told = "what change_batch_size is told", {"batch size": batch_size}
            remedy = "Decide from numbers that are equal on all, or on one replica."
            self.replica.check_agreement(what, told, remedy)
            self.check_batch_size(batch_size, first)
            sampler.change_from(first, batch_size)
        return first

    def check_batch_size(self, batch_size: int, first_step: int = 1) -> None:
        """Raises ValueError if this size, from a step on, cannot be used."""
        schedule = self.sampler.schedule.changed(first_step, batch_size)
        checks.check_groups(self._run, self.param_groups, schedule)

    def average_buffers(self, model: nn.Module) -> None:
        """Makes the model's buffers equal on all replicas.

        Each replica weighs as many samples as it has seen since the last call. Call it
        on every replica before evaluation and before a checkpoint: BatchNorm's running
        statistics drift apart. It costs two sums over the buffers. Integer buffers get
        what every replica has added since the last call, or since `follow_buffers`. See
        `variable_batch_size.buffers` for what it cannot restore.

        Raises:
            ReplicaError: Replicas have used different hyperparameters; on an
                accelerator this is where it is found.
        """
        if self.updates.ballots is not None:
            self.updates.ballots.check()
        if not self._run.sums.keeps_buffers:
            num_seen = self.updates.num_seen
            buffers.guess(model, num_seen, self._starts)
            buffers.average_buffers(model, num_seen, self.replica, self._starts)
            self.updates.num_seen = 0

    def follow_buffers(self, model: nn.Module) -> None:
        """Tells that the model's integer buffers are equal on all replicas now.

        `epochs`, `Checkpointer` and the trainers' adapters call it; in a loop of your
        own call it before training if forward passes change integer buffers other
        than BatchNorm's. Does nothing between a minibatch and `average_buffers`, but
        warns of tied parameters that came apart.
        """
        checks.warn_of_lost_ties(model, self.replica)
        is_needed = not self._run.sums.keeps_buffers and self.replica.num_replicas > 1
        if is_needed and self.updates.num_seen == 0:
            self.replica.sync()
            buffers.follow(model, self._starts)
            self.replica.sync()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. Collective: its parameters become those of replica 0."""
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        param_group = {**param_group, "params": params}
        unnamed = [p[1] if isinstance(p, tuple) else p for p in params]
        group = {**self.defaults, **param_group, "params": unnamed}
        checks.check_groups(self._run, [group])
        if self.replica.is_sharded(unnamed) and not self._run.sharded:
            raise ValueError(
                "add_param_group: these parameters are sharded, and those that the "
                "wrapper was built with are not: build it with a sharded one, too"
            )
        self.inner.add_param_group(param_group)
        self.updates.gradients.add(self.param_groups[-1]["params"])

    # --- what can be asked ----------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self.updates.account.epoch

    @property
    def place(self) -> Place:
        """The epoch, step and substep of the minibatch that `step` trains next.

        Steps are numbered within their epoch. After the last one the step is their
        number, `EpochPlan.num_steps`.
        """
        account = self.updates.account
        return Place(account.epoch, account.number, account.substep)

    @property
    def is_idle(self) -> bool:
        """Whether this replica has no minibatch in the step under way."""
        return self.updates.account.idle

    @property
    def is_padding(self) -> bool:
        """Whether the minibatch under way does not count, until `step` ends it.

        With sharded parameters every replica must run every pass, so one that has no
        minibatch left in a step runs one that another replica runs too. Its gradient
        and its weight are zero. Leave it out of metrics.
        """
        return self.updates.account.is_padding

    @property
    def sample_weights(self) -> torch.Tensor:
        """``(minibatch_size,)``: 1 for samples of this minibatch, 0 for its padding.

        With ``CustomSampler(pad_minibatches=True)`` the loss of a minibatch is
        ``(losses * optimizer.sample_weights).sum()``, and `step` knows how many samples
        count. It is data on the device, not read and not compiled anew.
        """
        account = self.updates.account
        account.check()
        assert self.updates.weights is not None
        return self.updates.weights.of_samples(account.num_real_samples)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """With ``max_grad_norm``: the last update's global norm before it was clipped.

        A tensor of shape ``()``; None before the first update.
        """
        return getattr(self.updates.parts.get("clipping"), "norm", None)

    def get_bs(self) -> int:
        """Returns the global batch size of the step under way; 0 after the last."""
        return getattr(self.updates.account.now, "batch_size", 0)

    def asked_to_stop(self, look: bool = False, every_seconds: float = 2.0) -> bool:
        """Returns whether all replicas stop after the update that was made last.

        Ask inside `attach`, where all replicas have made the same updates, as
        `Checkpointer` does. They agree without a collective or, unless ``look`` or
        once in so many seconds, a transfer of their own; see `Ballots.stop_agreed`.
        """
        ballots = self.updates.ballots
        if ballots is None:
            return xla_replica.stop_requested() is not None
        return ballots.stop_agreed(look, every_seconds)

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
        return {**self.inner.state_dict(), "elastic": self.updates.state_dict()}

    def load_state_dict(
        self, state_dict: State, *, place: bool = True, allow_changes: bool = False
    ) -> None:
        """Loads what `state_dict` returned, or the state of a plain torch optimizer.

        The sampler is restored with it: begin the loop at ``sampler.epoch``.
        Attach schedulers before, in the same order as they were.

        Args:
            state_dict: On every replica.
            place: Continue at the saved epoch and step. If False, only weights' states,
                schedulers and measurements are taken: for another training run.
            allow_changes: Accept other settings and hyperparameters than the saved
                run had, of which those of parameter groups are then the saved ones, as
                in torch; fewer schedulers; and what `CustomSampler.load_state_dict`
                accepts.

        Raises:
            ValueError: The state does not fit the parameter groups, or is of another
                rule or run.
        """
        elastic = dict(state_dict.get("elastic", {}))
        if not place:
            elastic.pop("sampler", None)
        self.updates.check_state(elastic, allow_changes)
        own = {name: value for name, value in state_dict.items() if name != "elastic"}
        self.inner.load_state_dict(own)
        self.updates.load_state_dict(elastic, allow_changes)

    # --- how ------------------------------------------------------------------------

    def _current_lrs(self) -> tuple[float, ...]:
        """Returns the learning rates of the step under way, or of the last update."""
        lrs, batch_size = self.get_lr(), self.get_bs()
        is_late = self.ref_weight is not None and not self.rule.measured
        if self.updates.account.ended or is_late:
            return as_floats(getattr(self.updates.made, "lr", lrs), self.replica)
        inputs = (batch_size / (self.ref_batchsize or 1),) * len(lrs)
        if self.rule.measured:
            inputs = self.noise.lr_factors(batch_size)
        return tuple(lr * self.rule.lr_factor(each) for lr, each in zip(lrs, inputs))
