"""`ElasticTrainer`: Hugging Face's `Trainer` under a trace, on any number of processes.

One iteration of the trainer's loop is one step of the trace, on every process: it
brings the list of the process's minibatches, which is empty where it is idle. So what
the trainer does once per update (schedulers, callbacks, logs, evaluation, checkpoints,
collectives of its own) happens at the same updates everywhere.

Needs the extra ``transformers``. It overrides four methods of `Trainer`, which are
public, and asks for the rest in a callback.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import unwrap_peft_model

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.checkpoint.save_and_stop import agreed_request, listen
from variable_batch_size.data.sampler import OrderProvider
from variable_batch_size.data.schedule import OnEnd
from variable_batch_size.integrations import steps
from variable_batch_size.integrations.steps import refuse
from variable_batch_size.traces.batch_trace import TraceSource

# Arguments of the trainer that must have their default, and the remedy.
_DEFAULTS = {
    "gradient_accumulation_steps": "the trace says how much is accumulated",
    "train_sampling_strategy": "pass order= to ElasticTrainer",
    "include_num_input_tokens_seen": "attach a function that adds up update.weight",
    "enable_jit_checkpoint": "SIGTERM and SIGINT save without it",
    "parallelism_config": "every process must have a whole model",
}


class ElasticTrainer(Trainer):
    """A `transformers.Trainer` whose global batch size follows a trace.

    ``args.per_device_train_batch_size`` is the size of a minibatch, and
    ``args.max_grad_norm`` bounds the gradient of a whole step. Every step's gradient is
    the mean over the tokens that `Trainer` counts (labels other than -100), or over its
    samples where there are none to count, whatever process ran which minibatch; so is
    the logged loss.

    The learning rate of the trainer's scheduler is the reference learning rate, which
    the rule scales. Logs have both, and the batch size.

    A checkpoint of the trainer is one of the elastic run, too: ``optimizer.pt`` has the
    sampler's place. `train` resumes it on any number of processes. On SIGTERM and
    SIGINT it saves and raises `xla_replica.Stopped`, as `Checkpointer` does.

    A subclass may have its own ``compute_loss``, and says by `Trainer`'s attribute
    ``loss_is_scaled_for_ga`` what it returns: True, a mean over tokens, as with
    ``num_items_in_batch``; or False, a mean over the samples of a minibatch. For a
    subclass of `Trainer`, such as ``Seq2SeqTrainer``, put this class first among the
    bases: ``class Mine(ElasticTrainer, Seq2SeqTrainer)``.

    Args:
        model, args, *others, **options: As for `Trainer`; ``args.max_steps`` is
            shortened to the trace.
        trace: The global batch size of every step; see `Trace`.
        rule, ref_batchsize, ref_weight, noise: See `ElasticOptimizer`; weights are
            numbers of tokens.
        order, on_end: See `CustomSampler`, whose seed is ``args.data_seed``, or
            ``args.seed``.
        callbacks: As for `Trainer`.

    Attributes:
        sampler: The `CustomSampler`.
        optimizer: When `train` has begun: the `ElasticOptimizer`.

    Raises:
        TypeError, ValueError: An argument of this class is wrong, or one of the
            trainer's would break the run.
        TraceError: The trace is bad or does not fit the dataset.
    """

    optimizer: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *others: Any,
        trace: TraceSource,
        rule: str | vbs.Rule = "linear",
        ref_batchsize: int | None = None,
        ref_weight: float | None = None,
        noise: vbs.NoiseOptions | bool = False,
        order: OrderProvider | None = None,
        on_end: OnEnd = "stop",
        callbacks: list[Any] | None = None,
        **options: Any,
    ) -> None:
        args = copy.copy(args or TrainingArguments("tmp_trainer"))  # not the caller's
        args.average_tokens_across_devices = False  # the optimizer does
        args.ignore_data_skip = True  # the sampler is where the run continues
        self.replica, self._run = _replica_of(args), _Run(self)
        callbacks = [self._run, *(callbacks or ())]
        super().__init__(model, args, *others, callbacks=callbacks, **options)
        self._refuse()
        config = getattr(self.model, "config", None)
        if not getattr(config, "is_encoder_decoder", False):
            # Models that fall back to this loss, as GPT-2 does, shift labels too.
            loss = getattr(self.model, "loss_function", None)
            self._loss_shifts_labels |= loss is ForCausalLMLoss
        seed = args.seed if args.data_seed is None else args.data_seed
        data, size = self.train_dataset, args.per_device_train_batch_size
        self.sampler = vbs.CustomSampler(
            data, trace, seed, minibatch_size=size, order=order, on_end=on_end
        )
        args.max_steps = self._num_updates()
        self._elastic = functools.partial(
            steps.StepOptimizer, sampler=self.sampler, rule=rule, noise=noise,
            ref_batchsize=ref_batchsize, ref_weight=ref_weight, reduction="sum",
            lockstep=True, max_grad_norm=args.max_grad_norm or None,
        )  # fmt: skip

    def _refuse(self) -> None:
        """Raises ValueError for what would break the run."""
        args, kind = self.args, self.accelerator.distributed_type.name
        for name, remedy in _DEFAULTS.items():
            is_set = getattr(args, name) != getattr(TrainingArguments, name)
            refuse(f"{name}={getattr(args, name)!r}: {remedy}", is_set)
        spread = kind not in ("NO", "MULTI_CPU", "MULTI_GPU") or self.is_model_parallel
        refuse(f"{kind} (FSDP, DeepSpeed, XLA, device_map): write a loop", spread)
        refuse("fp16: bf16=True needs no loss scaling", self.accelerator.scaler)
        refuse("several GPUs in a process: start one for each", args.n_gpu > 1)
        in_backward = "lomo" in args.optim or "layerwise" in args.optim
        refuse(f"optim={args.optim!r}: take one that updates in step()", in_backward)

    def _num_updates(self) -> int:
        """Returns how many updates the trainer makes; epochs may differ in theirs."""
        args, schedule = self.args, self.sampler.schedule
        if args.max_steps > 0:
            ends, num = schedule.num_epochs < math.inf, args.max_steps
            return min(num, len(schedule.trace)) if ends else num
        whole = int(args.num_train_epochs)
        part = (args.num_train_epochs - whole) * len(schedule.steps(whole))
        return math.ceil(part) + (self.sampler.num_updates(whole) if whole else 0)

    # --- the four methods of the trainer ----------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Returns a loader of steps: each is the list of this process's minibatches."""
        loader = super().get_train_dataloader()
        names = (
            "collate_fn", "num_workers", "pin_memory", "persistent_workers",
            "prefetch_factor", "multiprocessing_context", "worker_init_fn",
        )  # fmt: skip
        options: Any = {name: getattr(loader, name) for name in names}
        loader = DataLoader(loader.dataset, batch_sampler=self.sampler, **options)
        self._run.loader, self._run.batches = loader, self.sampler
        return self._run

    def create_optimizer(self, model: nn.Module | None = None) -> vbs.ElasticOptimizer:
        """Returns the elastic optimizer around the one that the trainer creates."""
        if isinstance(self.optimizer, steps.StepOptimizer):
            return self.optimizer
        self.optimizer = self._elastic(super().create_optimizer(model))
        self.optimizer.attach(functools.partial(setattr, self, "_update"))
        # Autocast and torch.compile, without DistributedDataParallel. The model is on
        # its device; to move it again, to "cpu:0", would copy the kept gradients.
        self.model_wrapped: Any = self.accelerator.prepare_model(
            self.model, device_placement=False, evaluation_mode=True
        )
        self.model_wrapped._is_accelerate_prepared = True
        return self.optimizer

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Runs this process's minibatches of a step, and makes its update.

        Returns this process's part of the step's mean loss over all tokens, times the
        number of processes, over which the trainer averages when it logs.
        """
        wrapper = nn.parallel.DistributedDataParallel
        refuse(f"{wrapper}: install accelerate 1.15", isinstance(model, wrapper))
        own, loss, weight = type(self).compute_loss, 0.0, 0
        over_tokens = self._is_mean_over_tokens()
        # Shadows the method, which a subclass may have overridden and returns a mean.
        self.__dict__["compute_loss"] = lambda *a, **b: own(self, *a, **b) * weight
        try:
            for minibatch in inputs:
                _, num = self.get_batch_samples(iter([minibatch]), 1, self.args.device)
                is_counted = num is not None and over_tokens
                weight = num if is_counted else self.sampler.minibatch_size
                num = None if num is None else num.clamp(min=1)  # of no token: zero
                loss = loss + super().training_step(model, minibatch, num)
                self.current_flos += self.floating_point_ops(minibatch)
                self.optimizer.weight = weight
                self.optimizer.end_minibatch()
        finally:
            del self.__dict__["compute_loss"]
        if not inputs:
            self.optimizer.join_step()
        total = torch.as_tensor(self._update.weight)
        return loss * self.replica.num_replicas / total.clamp(min=1).reshape(())

    def _is_mean_over_tokens(self) -> bool:
        """Returns whether a minibatch's loss is a mean over its tokens, or samples.

        Raises ValueError where only the user can know, and has not said so.
        """
        is_own = type(self).compute_loss is not Trainer.compute_loss
        is_own |= self.compute_loss_func is not None
        is_own |= not isinstance(unwrap_peft_model(self.model), PreTrainedModel)
        refuse(
            "a loss of your own without loss_is_scaled_for_ga: set it to True if this "
            "is a mean over tokens, or False if it is one over a minibatch's samples",
            is_own and self.loss_is_scaled_for_ga is None,
        )
        return self.loss_is_scaled_for_ga is not False

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """Logs as the trainer does, and the step's batch size and learning rate."""
        logs.pop("train_samples_per_second", None)  # at a constant batch size
        if "loss" in logs:
            logs.pop("grad_norm", None)  # after the update, when gradients are zero
            if self.optimizer.grad_norm is not None:
                logs["grad_norm"] = float(self.optimizer.grad_norm)
            logs["batch_size"] = self._update.batch_size
            logs["effective_learning_rate"] = float(self._update.lr[0])
        super().log(logs, *arguments, **named)

    # --- the run ----------------------------------------------------------------------

    def last_checkpoint(self) -> str | None:
        """Returns the newest whole checkpoint in ``args.output_dir``. Collective.

        One in which a kill has interrupted the trainer is left out. Returns None if
        there is none.
        """
        found = None
        files = Path(self.args.output_dir).glob("checkpoint-*/trainer_state.json")
        for file in sorted(files, key=lambda f: int(f.parent.name.split("-")[1])):
            with contextlib.suppress(ValueError):  # it is written last
                json.loads(file.read_text())
                found = str(file.parent)
        return self.replica.all_gather_object(found)[0]


class _Run(steps.Steps, TrainerCallback):
    """The epochs that are left, one whenever it is iterated; and a callback.

    It has no length, so that the trainer asks for epochs until ``max_steps``. As a
    callback it counts epochs as they are, and saves where all agree to stop.
    """

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer
        self._request: xla_replica.StopRequest | None = None

    def __iter__(self) -> Iterator[steps.Minibatches]:
        trainer, (epoch, step) = self._trainer, self.batches.cursor
        epoch += step == len(self.batches.schedule.steps(epoch))
        self.begin(epoch, trainer.optimizer, trainer.state.global_step)
        for minibatches in super().__iter__():
            yield minibatches
            if (request := self._request) is not None:  # the trainer has saved since
                trainer.replica.barrier()  # nobody leaves while process 0 writes
                raise xla_replica.Stopped(request.reason, request.exit_status)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        listen()
        self._trainer.optimizer.follow_buffers(self._trainer.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        epoch, step = self.batches.cursor
        state.epoch = epoch + step / len(self.batches.schedule.steps(epoch))
        if self._trainer.optimizer.asked_to_stop(look=control.should_save):
            self._request = agreed_request(self._trainer.replica)
            control.should_save, control.should_evaluate = True, False
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_save or control.should_evaluate:
            self._trainer.optimizer.average_buffers(self._trainer.model)


def _replica_of(args: TrainingArguments) -> xla_replica.Replica:
    """Returns the replica that this process is, in a group that Accelerate finds."""
    args.device  # noqa: B018 (joins the process group, where torchrun has started)
    replica = xla_replica.current()
    if args.world_size == 1 and replica.num_replicas > 1:  # xla_replica.launch has
        own = {"RANK": str(replica.rank), "WORLD_SIZE": str(replica.num_replicas)}
        local = {f"LOCAL_{name}": value for name, value in own.items()}
        os.environ.update({**local, **os.environ, **own})
        vars(args).pop("_setup_devices")
    kind = args.device.type
    remedy = "pass use_cpu=True, or launch on it"
    refuse(f"{kind} where this is {replica}: {remedy}", kind != replica.device.type)
    return replica
