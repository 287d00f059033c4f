"""`ElasticTrainer`: Hugging Face's `Trainer` under a trace, on any number of processes.

One iteration of the trainer's loop is one step of the trace, on every process: it
brings the list of the process's minibatches, which is empty where it is idle. So what
the trainer does once per update (schedulers, callbacks, logs, evaluation, checkpoints,
collectives of its own) happens at the same updates everywhere.

Needs the extra ``transformers``. It overrides methods that are not public, as they are
in transformers 5.23 with Accelerate 1.15.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState, TrainingArguments, set_seed
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, seed_worker

import xla_replica
from variable_batch_size.checkpoint.save_and_stop import agreed_request, listen
from variable_batch_size.data.sampler import CustomSampler, OrderProvider
from variable_batch_size.data.schedule import OnEnd
from variable_batch_size.gradient_noise.meter import NoiseOptions
from variable_batch_size.integrations import hugging_face_checks as checks
from variable_batch_size.integrations.steps import (
    Minibatches,
    StepOptimizer,
    StepSampler,
)
from variable_batch_size.optimizer import ElasticOptimizer
from variable_batch_size.rules.rule import Rule
from variable_batch_size.step.attached import Update
from variable_batch_size.traces.batch_trace import TraceSource
from xla_replica.stopping import listening

logger = logging.getLogger(__name__)


class _CountedOptimizer(StepOptimizer):
    def change_batch_size(self, batch_size: int) -> int:
        """Raises TypeError: the trainer has been told how many steps there are."""
        raise TypeError(
            f"change_batch_size({batch_size!r}): the trainer counts the steps of the "
            "trace before it trains. Write the change into the trace, or train in a "
            "loop of your own"
        )


class ElasticTrainer(Trainer):
    """A `transformers.Trainer` whose global batch size follows a trace.

    ``args.per_device_train_batch_size`` is the size of a minibatch, and
    ``args.max_grad_norm`` bounds the gradient of a whole step. Every step's gradient is
    the mean over its tokens (labels other than -100), or over its samples where there
    are no labels to count, whatever process ran which minibatch; so is the logged loss.

    The learning rate of the trainer's scheduler is the reference learning rate, which
    the rule scales. Logs have both, and the batch size.

    A checkpoint of the trainer is one of the elastic run, too: ``optimizer.pt`` has the
    sampler's place. `train` resumes it on any number of processes. On SIGTERM and
    SIGINT it saves and raises `xla_replica.Stopped`, as `Checkpointer` does.

    A subclass may have its own ``compute_loss``, which returns a mean as in `Trainer`.
    For a subclass of `Trainer`, such as ``Seq2SeqTrainer``, put this class first among
    the bases: ``class Mine(ElasticTrainer, Seq2SeqTrainer)``.

    Args:
        model, args, *others, **options: As for `Trainer`; ``args`` is needed.
        trace: The global batch size of every step; see `Trace`.
        rule, ref_batchsize, ref_weight, noise: See `ElasticOptimizer`; weights are
            numbers of tokens.
        order, on_end: See `CustomSampler`, whose seed is ``args.data_seed``, or
            ``args.seed``.

    Attributes:
        sampler: The `CustomSampler`.
        optimizer: When `train` has begun: the `ElasticOptimizer`.

    Raises:
        TypeError, ValueError: An argument of this class is wrong, or one of the
            trainer's would break the run; see `refusals`.
        TraceError: The trace is bad or does not fit the dataset.
    """

    optimizer: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *others: Any,
        trace: TraceSource,
        rule: str | Rule = "linear",
        ref_batchsize: int | None = None,
        ref_weight: float | None = None,
        noise: NoiseOptions | bool = False,
        order: OrderProvider | None = None,
        on_end: OnEnd = "stop",
        **options: Any,
    ) -> None:
        checks.check_library()
        if args is None:
            raise TypeError(
                "ElasticTrainer needs args=TrainingArguments(...), whose "
                "per_device_train_batch_size is the size of a minibatch"
            )
        checks.check_arguments(args)
        args = copy.copy(args)  # what is changed below is not the caller's
        args.average_tokens_across_devices = False  # the optimizer does
        args.device  # noqa: B018 (joins the process group, where torchrun has started)
        self.replica = xla_replica.current()
        checks.tell_accelerate(args, self.replica)
        super().__init__(model, args, *others, **options)
        checks.check_trainer(self)
        config = getattr(self.model, "config", None)
        if not getattr(config, "is_encoder_decoder", False):
            # Models that fall back to this loss, as GPT-2 does, shift labels too.
            loss = getattr(self.model, "loss_function", None)
            self._loss_shifts_labels |= loss is ForCausalLMLoss
        self.sampler = CustomSampler(
            self.train_dataset,
            trace,
            args.seed if args.data_seed is None else args.data_seed,
            self.replica.num_replicas,
            self.replica.rank,
            args.per_device_train_batch_size,
            order=order,
            on_end=on_end,
        )
        self._elastic: dict[str, Any] = {
            "rule": rule, "ref_batchsize": ref_batchsize, "ref_weight": ref_weight,
            "noise": noise,
        }  # fmt: skip
        self._begun = False
        self._update: Update | None = None

    # --- data and steps -------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns a loader of steps: each is a list of this process's minibatches."""
        args, dataset, collate = self.args, self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names"):  # of the package datasets
            dataset = self._remove_unused_columns(dataset, "training")
        else:
            collate = self._get_collator_with_removed_columns(collate, "training")
        return DataLoader(
            Minibatches(dataset, collate),
            batch_sampler=StepSampler(self.sampler),
            collate_fn=list,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and not self.replica.is_host,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=functools.partial(
                seed_worker,
                num_workers=args.dataloader_num_workers,
                rank=args.process_index,
            ),
        )

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[Any]
    ) -> tuple[int, int, int, int, int, int, int]:
        """Returns what the trainer counts with; epochs may differ in their steps."""
        del dataloader
        schedule, trace = self.sampler.schedule, self.sampler.schedule.trace
        whole = int(args.num_train_epochs)
        max_steps = schedule.steps(whole - 1).stop if whole else 0
        if part := args.num_train_epochs - whole:
            max_steps += math.ceil(part * len(schedule.steps(whole)))
        lacks = args.num_train_epochs > schedule.num_epochs
        if args.max_steps > 0:
            lacks = schedule.num_epochs < math.inf and args.max_steps > len(trace)
            max_steps = len(trace) if lacks else args.max_steps
        if lacks:
            logger.warning(
                f"the trace ends after {len(trace)} steps, {schedule.num_epochs:g} "
                "epochs; training ends there too"
            )
        num_samples = schedule.samples_before(max_steps)
        return (
            self._place_of(max_steps - 1)[0] + 1,
            len(schedule.steps(0)),
            schedule.num_samples,
            num_samples,
            round(num_samples / max_steps),
            len(schedule.steps(0)),
            max_steps,
        )

    def _place_of(self, num_updates: int) -> tuple[int, int]:
        """Returns the epoch after so many updates, and its steps that are done."""
        schedule, epoch = self.sampler.schedule, 0
        while len(steps := schedule.steps(epoch)) and num_updates >= steps.stop:
            epoch += 1
        return epoch, num_updates - steps.start

    def _init_training_state(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        super()._init_training_state(*arguments, **named)
        return self._place_of(self.state.global_step)

    def _run_epoch(self, *, epoch: int, **arguments: Any) -> None:
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)
        if hasattr(self.train_dataset, "set_epoch"):
            self.train_dataset.set_epoch(epoch)
        plan, state = self.sampler.plan, self.state
        if plan.first_step + plan.start_step != state.global_step:
            raise ValueError(
                f"the checkpoint was saved after {state.global_step} updates, and its "
                f"optimizer is at step {plan.first_step + plan.start_step} of the "
                "trace: it was saved by another trainer than ElasticTrainer, or with "
                "save_only_model=True, which leaves out what a run continues with"
            )
        arguments["steps_in_epoch"] = plan.num_steps
        arguments["num_update_steps_per_epoch"] = plan.num_steps
        super()._run_epoch(epoch=epoch, **arguments)

    # --- a step ---------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> ElasticOptimizer:
        """Returns the elastic optimizer around the one that the trainer creates."""
        if not isinstance(self.optimizer, ElasticOptimizer):
            self.optimizer = _CountedOptimizer(
                super().create_optimizer(model),
                self.sampler,
                reduction="sum",
                max_grad_norm=self.args.max_grad_norm or None,
                lockstep=True,
                replica=self.replica,
                **self._elastic,
            )
            self.optimizer.attach(self._after_update)
        return self.optimizer

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        if not training:
            return super()._wrap_model(model, training, dataloader)
        # Autocast and torch.compile, without DistributedDataParallel. The model is on
        # its device; to move it again, to "cpu:0", would copy the kept gradients.
        prepared: Any = self.accelerator.prepare_model(
            model, device_placement=False, evaluation_mode=True
        )
        prepared._is_accelerate_prepared = True
        return prepared

    def training_step(
        self,
        model: nn.Module,
        inputs: Sequence[Mapping[str, Any]],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Runs and accumulates this process's minibatches of a step.

        Returns the mean of their losses; zero where it has none.
        """
        del num_items_in_batch  # of this process, and the step has others
        self._loss_before = self._tr_loss.clone()
        self._loss_sum = torch.zeros_like(self._tr_loss)
        num_items = torch.zeros_like(self._tr_loss)
        for number, minibatch in enumerate(inputs, 1):
            weight = counted = self._get_num_items_in_batch(
                [minibatch], self.args.device
            )
            if weight is None:
                weight = torch.full_like(num_items, self.sampler.minibatch_size)
            if counted is not None:
                counted = weight.clamp(min=1)  # a mean over no token is zero
            # Shadows the method, which a subclass may have overridden.
            self.compute_loss = functools.partial(self._sum_of_losses, weight)
            try:
                self._loss_sum += super().training_step(model, minibatch, counted)
            finally:
                del self.compute_loss
            num_items += weight
            self.optimizer.weight = weight
            if number < len(inputs):
                self.optimizer.accumulate()
        return self._loss_sum / num_items.clamp(min=1)

    def _sum_of_losses(
        self, num_items: torch.Tensor, *arguments: Any, **named: Any
    ) -> torch.Tensor:
        """Returns the mean loss that the class computes, times what it is a mean of."""
        own: Any = type(self)
        return own.compute_loss(self, *arguments, **named) * num_items

    def _after_update(self, update: Update) -> None:
        """Makes the trainer's sum of losses that of the step's mean over all tokens."""
        self._update = update
        weight = torch.as_tensor(update.weight).clamp(min=1).reshape(())
        # The trainer averages it over processes when it logs.
        loss = self._loss_sum * self.replica.num_replicas / weight
        if self.args.logging_nan_inf_filter:
            num_logged = self.state.global_step - self._globalstep_last_logged
            mean = self._loss_before / (1 + num_logged)
            loss = torch.where(loss.isfinite(), loss, mean)
        self._tr_loss.copy_(self._loss_before + loss)
        if self.optimizer.grad_norm is not None:
            self._grad_norm.copy_(self.optimizer.grad_norm)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Does nothing: the optimizer clips the whole step's gradient."""

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: Any = None
    ) -> torch.Tensor | None:
        """Returns the norm of the step's gradient, which the update fills in."""
        if self.optimizer.max_grad_norm is None:
            return None
        self._grad_norm = torch.zeros((), device=self.args.device)
        return self._grad_norm

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns the operations of a step's minibatches on this process."""
        return sum(super(ElasticTrainer, self).floating_point_ops(m) for m in inputs)

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """Logs as the trainer does, and the step's batch size and learning rate."""
        if "loss" in logs and self._update is not None:
            logs["batch_size"] = self._update.batch_size
            logs["effective_learning_rate"] = float(self._update.lr[0])
        super().log(logs, *arguments, **named)

    # --- the run --------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, **options: Any
    ) -> Any:
        """Trains, once; as `Trainer.train`.

        Args:
            resume_from_checkpoint: A folder; True for `last_checkpoint`, and an error
                if there is none.
            options: See `Trainer.train`.

        Raises:
            Stopped: It was asked to stop, and has saved a checkpoint.
            RuntimeError: It has trained before.
            ValueError: The checkpoint is of another run.
        """
        if self._begun:
            raise RuntimeError(
                "train() was called before, and sampler and optimizer are where it "
                "ended: build another ElasticTrainer"
            )
        self._begun = True
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.last_checkpoint() or True
        with listening():
            listen()
            return super().train(resume_from_checkpoint, **options)

    def last_checkpoint(self) -> str | None:
        """Returns the newest whole checkpoint in ``args.output_dir``. Collective.

        One in which a kill has interrupted the trainer is left out, with a warning.
        Returns None if there is none.
        """
        found = None
        folders = Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*[0-9]")
        for folder in sorted(folders, key=lambda f: int(f.name.rpartition("-")[2])):
            try:  # it is written last
                TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
                found = str(folder)
            except (OSError, ValueError, TypeError):
                logger.warning("%s is not whole, and is not resumed", folder)
        return self.replica.all_gather_object(found)[0]

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        """Also stops, after saving, where all processes have agreed to."""
        control, request = self.control, None
        if self.optimizer.asked_to_stop(look=control.should_save):
            request = agreed_request(self.replica)
            control.should_save, control.should_evaluate = True, False
        if control.should_save or control.should_evaluate:
            self.optimizer.average_buffers(self.model)
        super()._maybe_log_save_evaluate(*arguments, **named)
        if request is not None:
            self.replica.barrier()  # nobody leaves while process 0 writes
            raise xla_replica.Stopped(request.reason, request.exit_status)

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        # What was not logged is averaged over processes, as what was.
        self.replica.all_reduce_([self._tr_loss])
        self._tr_loss /= self.replica.num_replicas
        return super()._finalize_training(*arguments, **named)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:  # an older one of the same number is no longer whole
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = Path(self._get_output_dir(trial), name)
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.replica.barrier()  # the trainer's state is written after all of these

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restores random numbers; a process that is new is seeded from those saved."""
        is_alone, rank = self.args.world_size <= 1, self.args.process_index
        own = "rng_state.pth" if is_alone else f"rng_state_{rank}.pth"
        saved = (own, "rng_state_0.pth", "rng_state.pth")
        found = [n for n in saved if checkpoint and Path(checkpoint, n).is_file()]
        if not found or found[0] == own:
            super()._load_rng_state(checkpoint)
            return
        digest = hashlib.sha256(Path(checkpoint or "", found[0]).read_bytes()).digest()
        set_seed((int.from_bytes(digest[:4], "little") + rank) % 2**32)
