"""Lightning under a trace: `ElasticStrategy`, for `lightning.pytorch` 2.6.

What Lightning takes for a batch is a whole step of the trace: the minibatches that this
replica has in it, or none. Lightning's loop then runs once per update on every
replica: ``global_step`` and ``batch_idx`` count updates, schedulers and loggers follow
them, and validation, checkpoints, early stopping and signals meet all replicas at the
same update.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

import xla_replica
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.integrations.refusals import LIGHTNING
from variable_batch_size.integrations.steps import StepOptimizer
from variable_batch_size.rules.rule import Rule
from variable_batch_size.runs.run_log import RunLog

logger = logging.getLogger(__name__)

# How Lightning's names of reductions, and torch's, are computed from all replicas.
_REDUCTIONS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "mean": lambda values, dim: values.sum(dim) / len(values),
    "avg": lambda values, dim: values.sum(dim) / len(values),
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


class ElasticStrategy(SingleDeviceStrategy):
    """Trains a LightningModule with the batch sizes of a trace, on any replicas.

    The loader of the training samples is ``DataLoader(dataset,
    batch_sampler=sampler)``; ``training_step`` gets its minibatches, one at a time, and
    returns their mean loss. Start the processes with torchrun or `xla_replica.launch`,
    and resume by Lightning's ``ckpt_path=`` on any number of them: the sampler's place
    is in the state of the optimizer. `docs/trainers.md` says what Lightning does
    differently here.

    Args:
        sampler: The sampler of the training samples.
        rule, ref_batchsize: How the learning rate follows the batch size; see
            `ElasticOptimizer`.
        **options: Further ones of `ElasticOptimizer`, such as ``max_grad_norm``. With
            ``reduction="sum"`` the ``training_step`` returns a dict that has
            ``weight`` beside ``loss``.

    Attributes:
        sampler: See the argument.
        replica: The replica that the process is.

    Raises:
        ValueError: Replicas are not processes, as on XLA.
    """

    strategy_name = "elastic"
    is_distributed = True  # so that self.log(..., sync_dist=True) calls `reduce`

    def __init__(
        self,
        sampler: CustomSampler,
        rule: str | Rule = "linear",
        ref_batchsize: int | None = None,
        **options: Any,
    ) -> None:
        self.sampler, self.replica = sampler, xla_replica.current()
        if self.replica.is_lazy:
            raise ValueError(
                f"ElasticStrategy is for replicas that are processes on CPUs or GPUs, "
                f"and this is {self.replica}: train with ElasticOptimizer in a loop "
                "of your own"
            )
        super().__init__(device=self.replica.device)
        self.global_rank = self.replica.rank
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.replica.rank))
        self.world_size = self.replica.num_replicas
        rank_zero_only.rank = self.replica.rank
        self._layer_sync: Any = None  # Lightning's, of Trainer(sync_batchnorm=True)
        self._options = {"rule": rule, "ref_batchsize": ref_batchsize, **options}
        self._log: RunLog | None = None
        self._is_inside_step = False
        self._may_lack_metrics = False

    @property
    def optimizer(self) -> StepOptimizer:
        """The wrapper of the module's optimizer, from the hook ``on_fit_start`` on."""
        [optimizer] = self.optimizers
        return optimizer

    # --- what a fit begins with -----------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Refuses what would break a promise, and wraps the optimizer."""
        # The sampler deals training samples; of others each replica evaluates all.
        trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn == "fit":
            for option, (is_wrong, remedy) in LIGHTNING.items():
                if is_wrong(self):
                    raise ValueError(
                        f"{option} does not work with ElasticStrategy: {remedy}"
                    )
            # Epochs have different numbers of steps; Lightning then counts each anew.
            trainer.reload_dataloaders_every_n_epochs = 1
            num_epochs, loop = self.sampler.num_epochs, trainer.fit_loop
            if num_epochs < (math.inf if loop.max_epochs == -1 else loop.max_epochs):
                logger.info(f"the trace ends after {num_epochs} epochs")
                loop.max_epochs = int(num_epochs)
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Lets Lightning build optimizer and schedulers, and wraps the optimizer."""
        super().setup_optimizers(trainer)
        [inner] = self.optimizers
        optimizer = StepOptimizer(inner, self.sampler, lockstep=True, **self._options)
        self.optimizers: list[StepOptimizer] = [optimizer]
        if trainer.log_every_n_steps:
            sinks = [_sink_of(each) for each in trainer.loggers]
            steps = trainer.log_every_n_steps
            self._log = RunLog(None, optimizer, log_steps=steps, sinks=sinks)
            optimizer.attach(self._log)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader of steps, for the loader whose samples the sampler deals."""
        if getattr(dataloader, "batch_sampler", None) is self.sampler:
            return _StepLoader(dataloader, self)
        return dataloader

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch of sampler and optimizer."""
        cursor = self.sampler.cursor
        num_steps = len(self.sampler.schedule.steps(cursor.epoch))
        if epoch > cursor.epoch + (cursor.step == num_steps):
            raise ValueError(
                f"Lightning begins epoch {epoch}, and the sampler is at step "
                f"{cursor.step} of {num_steps} of epoch {cursor.epoch}: the steps "
                "between would be left out. Resume with ckpt_path= from a checkpoint "
                "that was saved under ElasticStrategy; Lightning calls an epoch "
                "ended in one that Trainer.save_checkpoint saves after max_steps"
            )
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)
        plan = self.sampler.plan
        most = plan.num_minibatches[plan.start_step :].max(initial=0)
        self._may_lack_metrics = most < plan.num_replicas

    # --- one step ---------------------------------------------------------------------

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step's minibatches and its update."""
        self._is_inside_step = True
        try:
            return super().optimizer_step(*args, **kwargs)
        finally:
            self._is_inside_step = False

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Runs the minibatches of a step; Lightning does the last backward pass.

        Returns what the module returned for the last one; zero if there is none.
        """
        trainer = self.lightning_module.trainer
        _check_step(trainer, batch)
        output = None
        for minibatch in batch.take():
            if output is not None:
                self.backward(_loss_of(output), self.optimizer)
                self.optimizer.accumulate()
            minibatch = self.precision_plugin.convert_input(minibatch)
            minibatch = super().batch_to_device(minibatch)
            # Lightning weighs logged values by the size of what it takes for the batch.
            trainer._results.batch, trainer._results.batch_size = minibatch, None
            output = super().training_step(minibatch, *args)
            if self._log:
                self._log.add(_loss_of(output))
            if isinstance(output, Mapping):
                self.optimizer.weight = output.get("weight")
        return torch.zeros((), device=self.root_device) if output is None else output

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the backward pass; none in a step without a minibatch."""
        if self.optimizer.is_idle:
            return closure_loss
        return super().backward(closure_loss, *args, **kwargs)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Moves a batch; those of a step follow one by one, when they are run."""
        if isinstance(batch, Minibatches):
            return batch
        return super().batch_to_device(batch, *args, **kwargs)

    # --- between steps, where all replicas meet ---------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the replica that writes files and logs."""
        return self.replica.is_primary

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: Any = "mean"
    ) -> torch.Tensor:
        """Returns the mean, sum, maximum or minimum over replicas. Collective."""
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in _REDUCTIONS:
            raise ValueError(
                f"reduce_op must be one of {sorted(_REDUCTIONS)}, got {reduce_op!r}"
            )
        if not isinstance(tensor, torch.Tensor):
            return tensor
        trainer = self.lightning_module.trainer
        if self._may_lack_metrics and trainer.training and tensor.is_floating_point():
            raise ValueError(
                "sync_dist=True for what training_step logs, in an epoch in which some "
                "replica has no minibatch: it has logged nothing and would not come. "
                "Log it without, or start fewer replicas: the trace's batches have "
                f"fewer than {self.world_size} minibatches"
            )
        return _REDUCTIONS[name](self._gather(tensor), 0)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Returns ``(num_replicas, *tensor.shape)``, without gradients. Collective."""
        if sync_grads:
            raise ValueError("all_gather(sync_grads=True) is not supported")
        return self._gather(tensor)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns once every replica has come."""
        self._check_meeting()
        self.replica.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of replica ``src``. Collective."""
        self._check_meeting()
        return self.replica.all_gather_object(obj)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether all replicas, or any, decide so. Collective."""
        self._check_meeting()
        decisions = self.replica.all_gather_object(bool(decision))
        return False not in decisions if all else True in decisions

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check_meeting()
        return self.replica.all_gather(tensor.to(self.root_device))

    def _check_meeting(self) -> None:
        if self._is_inside_step and self.world_size > 1:
            raise ValueError(
                "a collective within training_step, or a hook of its backward pass: "
                "replicas run different numbers of minibatches, so they would not "
                "meet. Use self.log(..., on_step=False, on_epoch=True, sync_dist=True),"
                " or call it in on_train_batch_end, which runs once per update"
            )

    def on_validation_start(self) -> None:
        """Makes BatchNorm's statistics equal on all replicas."""
        if self.optimizers:
            self.optimizer.average_buffers(self.lightning_module)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state; with averaged statistics while it trains."""
        if self.optimizers and self.lightning_module.trainer.state.status == "running":
            self.optimizer.average_buffers(self.lightning_module)
        return super().lightning_module_state_dict()


class Minibatches:
    """This replica's minibatches of one step: what callbacks get as the batch.

    They are read from the loader when they are run; ``len()`` says how many they are.

    Attributes:
        step: Steps of the epoch before this one.
    """

    def __init__(self, step: int, num: int, source: Iterator[Any]) -> None:
        self.step, self._num, self._source = step, num, source

    def __len__(self) -> int:
        return self._num

    def take(self) -> Iterator[Any]:
        """Yields them, once; the strategy does."""
        for _ in range(self._num):
            yield next(self._source)


class _StepLoader:
    """Yields the `Minibatches` of every step of an epoch."""

    def __init__(self, loader: DataLoader[Any], strategy: ElasticStrategy) -> None:
        self._loader, self._strategy = loader, strategy
        self.sampler = self  # Lightning calls its set_epoch before every epoch

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, also of a dataset that wants to know, as SeededDataset."""
        self._strategy.begin_epoch(epoch)
        if hasattr(self._loader.dataset, "set_epoch"):
            self._loader.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the sampler's place is in the state of the optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing; having it tells Lightning that the loader can be resumed."""

    def __len__(self) -> int:
        """Returns the steps of the epoch, those included that are done already."""
        loop = self._strategy.lightning_module.trainer.fit_loop
        schedule = self._strategy.sampler.schedule
        return len(schedule.steps(loop.epoch_progress.current.processed))

    def __iter__(self) -> Iterator[Minibatches]:
        plan = self._strategy.sampler.plan
        source, rank = iter(self._loader), self._strategy.replica.rank
        for step, num in enumerate(plan.num_substeps(rank).tolist()):
            if self._strategy.sampler.plan is not plan:
                raise ValueError(
                    "batch sizes changed within an epoch, as by a BatchSizeController: "
                    "Lightning needs to know an epoch's steps when it begins; replay "
                    "the decided trace instead"
                )
            if step >= plan.start_step:
                yield Minibatches(step, num, source)


def _sink_of(logger: Any) -> Callable[..., None]:
    """Returns what hands a run log's numbers to one of Lightning's loggers."""

    def log(values: dict[str, float], /, *, step: int) -> None:
        named = {f"elastic/{name}": value for name, value in values.items()}
        logger.log_metrics(named, step=step)

    return log


def _loss_of(output: Any) -> torch.Tensor:
    """Returns the loss of a minibatch from what ``training_step`` has returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            "training_step must return the minibatch's loss, a tensor, or a dict with "
            f"'loss', got {output!r}. A minibatch cannot be skipped; return a loss of "
            "zero, such as 0 * loss"
        )
    return loss


def _check_step(trainer: Trainer, batch: Any) -> None:
    """Raises ValueError unless Lightning is about to run the sampler's next step."""
    if not isinstance(batch, Minibatches):
        raise ValueError(
            f"training_step got a batch of type {type(batch).__name__} that the "
            "strategy's sampler has not dealt: the training loader must be "
            "DataLoader(dataset, batch_sampler=sampler), with the sampler that "
            "ElasticStrategy was given"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            "a callback has set trainer.accumulate_grad_batches to "
            f"{trainer.accumulate_grad_batches}, as GradientAccumulationScheduler and "
            "StochasticWeightAveraging do: ElasticStrategy does not support it; the "
            "trace says how much is accumulated"
        )
    if batch.step != trainer.fit_loop.batch_idx:
        raise ValueError(
            f"Lightning is at batch {trainer.fit_loop.batch_idx} of the epoch, and the "
            f"sampler at step {batch.step}: resume with ckpt_path= from a checkpoint "
            "that was saved under ElasticStrategy"
        )
