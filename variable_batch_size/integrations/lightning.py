"""Lightning under a trace: `ElasticStrategy`, for `lightning.pytorch`.

What Lightning takes for a batch is a whole step of the trace: the list of the
minibatches that this replica has in it, or none. Lightning's loop then runs once per
update on every replica: ``global_step`` and ``batch_idx`` count updates, schedulers and
loggers follow them, and validation, checkpoints and early stopping meet all replicas
at the same update.

Beside the collectives, it overrides four methods of Lightning's strategy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.integrations import steps
from variable_batch_size.integrations.steps import refuse

_REDUCTIONS: Any = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


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
        optimizer: The wrapper of the module's optimizer, from the hook ``on_fit_start``
            on.

    Raises:
        ValueError: Replicas are not processes, as on XLA.
    """

    strategy_name = "elastic"
    is_distributed = True  # so that self.log(..., sync_dist=True) calls `reduce`

    def __init__(
        self,
        sampler: vbs.CustomSampler,
        rule: str | vbs.Rule = "linear",
        ref_batchsize: int | None = None,
        **options: Any,
    ) -> None:
        self.sampler, self.replica = sampler, xla_replica.current()
        refuse(f"{self.replica}: write a loop", self.replica.is_lazy)
        super().__init__(device=self.replica.device)
        self.global_rank = rank_zero_only.rank = self.replica.rank
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.replica.rank))
        self.world_size = self.replica.num_replicas
        self._layer_sync: Any = None  # Lightning's, of Trainer(sync_batchnorm=True)
        options |= {"rule": rule, "ref_batchsize": ref_batchsize, "lockstep": True}
        self._options = options
        self._log: vbs.RunLog | None = None
        self._is_inside_step = False

    # --- the four methods of the strategy ---------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Refuses what would break a run, and wraps the optimizer."""
        # The sampler deals training samples; of others each replica evaluates all.
        trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn != "fit":
            return super().setup(trainer)
        self._refuse(trainer, self.lightning_module)
        # Epochs have different numbers of steps; Lightning then counts each anew.
        trainer.reload_dataloaders_every_n_epochs = 1
        loop, most = trainer.fit_loop, self.sampler.num_epochs
        if most < (math.inf if loop.max_epochs == -1 else loop.max_epochs):
            loop.max_epochs = int(most)
        super().setup(trainer)
        [inner] = self.optimizers
        self.optimizer = steps.StepOptimizer(inner, self.sampler, **self._options)
        self.optimizers: list[Any] = [self.optimizer]
        if num := trainer.log_every_n_steps:
            sinks = [_sink_of(each) for each in trainer.loggers]
            self._log = vbs.RunLog(None, self.optimizer, log_steps=num, sinks=sinks)
            self.optimizer.attach(self._log)
        trainer.callbacks.insert(0, _EqualBuffers())

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader of steps, for the loader whose samples the sampler deals."""
        if getattr(dataloader, "batch_sampler", None) is self.sampler:
            return _StepLoader(dataloader, self.lightning_module.trainer)
        return dataloader

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Moves a batch; those of a step follow one by one, when they are run."""
        if isinstance(batch, steps.Minibatches):
            return batch
        return super().batch_to_device(batch, *args, **kwargs)

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Runs the minibatches of a step; Lightning does the last backward pass.

        Returns what the module returned for the last one; zero if there is none.
        """
        num = self.lightning_module.trainer.accumulate_grad_batches
        refuse("accumulate_grad_batches: the trace says how much it is", num != 1)
        loader = "a training loader but DataLoader(dataset, batch_sampler=sampler)"
        refuse(loader, not isinstance(batch, steps.Minibatches))
        output: Any = torch.zeros((), device=self.root_device, requires_grad=True)
        for number, minibatch in enumerate(batch):
            if number:
                self.backward(_loss_of(output), self.optimizer)
                self.optimizer.end_minibatch()
            self._is_inside_step = True
            output = super().training_step(self.batch_to_device(minibatch), *args)
            self._is_inside_step = False
            loss = _loss_of(output)
            if self._log:
                self._log.add(loss)
            if isinstance(output, Mapping):
                self.optimizer.weight = output.get("weight")
        return output

    # --- between steps, where all replicas meet ---------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the replica that writes files and logs."""
        return self.replica.is_primary

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the mean, sum, maximum or minimum over replicas. Collective."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if self.lightning_module.trainer.training and tensor.is_floating_point():
            plan, why = self.sampler.plan, "some replica has no minibatch in the epoch"
            most = plan.num_minibatches[plan.start_step :].max(initial=0)
            refuse(f"sync_dist=True, as {why}: leave it out", most < plan.num_replicas)
        name = str(reduce_op).rpartition(".")[2].lower()
        values = self.all_gather(tensor)
        is_mean = name in ("mean", "avg")
        return values.sum(0) / len(values) if is_mean else _REDUCTIONS[name](values, 0)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Returns ``(num_replicas, *tensor.shape)``, without gradients. Collective."""
        refuse("all_gather(sync_grads=True): gather detached tensors", sync_grads)
        return self._peers.all_gather(tensor.to(self.root_device))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns once every replica has come."""
        self._peers.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of replica ``src``. Collective."""
        return self._peers.all_gather_object(obj)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether all replicas, or any, decide so. Collective."""
        decisions = self._peers.all_gather_object(bool(decision))
        return False not in decisions if all else True in decisions

    @property
    def _peers(self) -> xla_replica.Replica:
        """The replica, where it may meet the others; else raises ValueError."""
        remedy = "log(..., on_step=False, on_epoch=True)"
        is_early = self._is_inside_step and self.world_size > 1
        refuse(f"collectives within training_step: {remedy}", is_early)
        return self.replica

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        """Raises ValueError for what would break the run."""
        hook, scaler = "on_before_batch_transfer", "scaler"
        known = {None, getattr(LightningModule, hook)}
        own = {getattr(type(x), hook, None) for x in (module, trainer.datamodule)}
        is_sharded = self.replica.is_sharded([*module.parameters()])
        num_devices = len(trainer._accelerator_connector._parallel_devices)
        refuse("gradient_clip_val: pass max_grad_norm=", trainer.gradient_clip_val)
        refuse("16-mixed: use bf16-mixed", getattr(self.precision_plugin, scaler, None))
        refuse("manual optimization: return a loss", not module.automatic_optimization)
        refuse("sync_batchnorm: it averages the statistics itself", self._layer_sync)
        refuse(f"{hook}: use on_after_batch_transfer or collate_fn", own - known)
        refuse("fully_shard: write a loop with ElasticOptimizer", is_sharded)
        is_one = num_devices > self.world_size == 1
        refuse("devices=: start the processes with torchrun", is_one)


class _EqualBuffers(Callback):
    """Makes BatchNorm's statistics equal where replicas evaluate or save."""

    def on_validation_start(self, trainer: Any, module: Any, *_: Any) -> None:
        trainer.strategy.optimizer.average_buffers(module)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.optimizer.follow_buffers(module)

    on_save_checkpoint = on_validation_start  # the checkpoint has the same tensors


class _StepLoader(steps.Steps):
    """Yields the `Minibatches` of every step of an epoch."""

    def __init__(self, loader: DataLoader[Any], trainer: Any) -> None:
        self.loader, self.batches = loader, trainer.strategy.sampler
        self._trainer, self.sampler = trainer, self  # whose set_epoch Lightning calls

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch of sampler, optimizer and dataset."""
        self.begin(epoch, self._trainer.strategy.optimizer, self._trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the sampler's place is in the state of the optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing; having it tells Lightning that the loader can be resumed."""

    def __len__(self) -> int:
        """Returns the steps of the epoch, those included that are done already."""
        epoch = self._trainer.fit_loop.epoch_progress.current.processed
        return len(self.batches.schedule.steps(epoch))


def _sink_of(logger: Any) -> Callable[..., None]:
    """Returns what hands a run log's numbers to one of Lightning's loggers."""
    return lambda values, step: logger.log_metrics(
        {f"elastic/{name}": value for name, value in values.items()}, step=step
    )


def _loss_of(output: Any) -> Any:
    """Returns the loss of a minibatch from what ``training_step`` has returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    remedy = "return the minibatch's loss, or 0 * loss to skip it"
    is_loss = isinstance(loss, torch.Tensor)
    refuse(f"a training_step that returned {output!r}: {remedy}", not is_loss)
    return loss
