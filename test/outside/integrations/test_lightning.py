"""Lightning trains under a trace: on any processes, killed and resumed."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.variable_batch_size.elastic import OPTIMIZERS, batches, make
from support.variable_batch_size.lightning_runs import (
    CASE,
    DECAY,
    MILESTONES,
    ElasticStrategy,
    Module,
    Samples,
    Small,
    lightning,
    loader_of,
    sampler_of,
    small_fit,
    trainer_of,
)
from support.variable_batch_size.resuming import loss_of
from support.xla_replica.replicas import Backend

import variable_batch_size as vbs
import xla_replica
from xla_replica import ReplicaError

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]


class Seen(lightning.Callback):
    """Keeps what callbacks are told, and kills the process after an update."""

    def __init__(self, kill_after: int | None) -> None:
        self.steps: list[tuple[int, int, int, float]] = []
        self.validated: list[int] = []
        self.num_batches: list[int] = []
        self._kill_after = kill_after

    def on_train_epoch_start(self, trainer, module):
        self.num_batches.append(trainer.num_training_batches)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((trainer.global_step, batch_idx, len(batch), lr))
        if trainer.global_step == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self, trainer, module):
        self.validated.append(trainer.global_step)


def fit(
    rank: int, folder: Path, kill_after: int | None = None, ckpt: str | None = None
) -> dict[str, Any]:
    """Trains with all of Lightning's extras, as a user writes it."""
    torch.set_num_threads(1)
    sampler = sampler_of()
    strategy = ElasticStrategy(sampler, CASE.rule, CASE.ref_batchsize, noise=True)
    path = folder / f"minibatches-{os.getpid()}.jsonl"

    def told(*line: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    module, seen = Module(told), Seen(kill_after)
    saves = lightning.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=5, save_top_k=-1
    )
    trainer = trainer_of(
        strategy,
        logger=lightning.loggers.CSVLogger(folder, name="log", version=""),
        callbacks=[seen, saves],
        enable_checkpointing=True,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
        log_every_n_steps=2,
    )
    validation = torch.utils.data.DataLoader(Samples(), batch_size=64)
    trainer.fit(module, loader_of(sampler), validation, ckpt_path=ckpt)
    return {
        "weights": [p.detach() for p in module.parameters()],
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "steps": seen.steps,
        "validated": seen.validated,
        "num_batches": seen.num_batches,
    }


def minibatches(folder: Path) -> list[tuple[int, float, list[int]]]:
    """Returns step, loss and samples of all minibatches of all processes and runs."""
    paths = folder.glob("minibatches-*.jsonl")
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def global_batches(folder: Path) -> dict[int, list[int]]:
    """Returns the sorted samples of every step, of all processes and runs."""
    steps: dict[int, list[int]] = {}
    for step, _, samples in minibatches(folder):
        steps.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in steps.items()}


@functools.cache
def oracle() -> dict[str, Any]:
    """Trains in plain torch with whole batches; what a run must have seen."""
    model, inputs, targets = make(CASE)
    optimizer = OPTIMIZERS[CASE.optimizer](model.parameters(), CASE.lr)
    lr, samples, lrs, epochs = CASE.lr, [], [], []
    for step, (epoch, rows) in enumerate(batches(CASE)):
        lr = lr * DECAY if step in MILESTONES else lr
        optimizer.param_groups[0]["lr"] = lr * len(rows) / CASE.ref_batchsize
        optimizer.zero_grad()
        # The sum of the minibatches' means is exact; it is divided once.
        num = len(rows) // CASE.minibatch_size
        (num * loss_of(model, inputs[rows], targets[rows])).backward()
        for parameter in model.parameters():
            parameter.grad /= num
        optimizer.step()
        samples.append(sorted(rows.tolist()))
        lrs.append(lr)
        epochs.append(epoch)
    weights = [p.detach() for p in model.parameters()]
    return {"weights": weights, "samples": samples, "lrs": lrs, "epochs": epochs}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run on three processes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, Backend("cpu", 3).run(fit, folder)


def test_it_is_large_batch_training(undisturbed):
    folder, outcomes = undisturbed
    expected = oracle()
    for outcome in outcomes:
        assert all(map(torch.equal, outcome["weights"], expected["weights"]))
    assert global_batches(folder) == dict(enumerate(expected["samples"]))


def test_lightning_counts_updates_on_every_replica(undisturbed):
    _, outcomes = undisturbed
    expected = oracle()
    num_updates = len(expected["lrs"])
    lengths = [expected["epochs"].count(epoch) for epoch in range(CASE.epochs)]
    assert len(set(lengths)) > 1
    sizes = [len(samples) // CASE.minibatch_size for samples in expected["samples"]]
    for rank, outcome in enumerate(outcomes):
        assert outcome["global_step"] == num_updates
        assert outcome["epoch"] == CASE.epochs
        assert outcome["num_batches"] == lengths
        steps, indices, nums, lrs = zip(*outcome["steps"])
        assert [*steps] == [*range(1, num_updates + 1)]
        assert [*indices] == [i for length in lengths for i in range(length)]
        assert [*nums] == [math.ceil((size - rank) / 3) for size in sizes]
        # Callbacks run after the scheduler: the rates are those of the next update.
        assert [*lrs[:-1]] == expected["lrs"][1:]
        sanity, *validated = outcome["validated"]
        assert (sanity, validated) == (0, [*range(3, num_updates + 1, 3)])
        assert outcome["metrics"] == outcomes[0]["metrics"]
    assert outcomes[1]["steps"][0][2] == 0  # idle in the first step


def test_the_trainers_logger_has_its_own_and_our_numbers(undisturbed):
    folder, _ = undisturbed
    table = pd.read_csv(folder / "log" / "metrics.csv").set_index("step")
    sizes = [len(samples) for samples in oracle()["samples"]]
    ours = table["elastic/batch_size"].dropna()
    assert ours.to_dict() == {step: sizes[step] for step in range(0, len(sizes), 2)}
    lrs = table["elastic/lr"].dropna().to_dict()
    assert lrs == {
        step: oracle()["lrs"][step] * sizes[step] / CASE.ref_batchsize for step in lrs
    }
    losses = table["elastic/loss"].dropna()
    assert [*losses.index] == [*ours.index]
    told = minibatches(folder)
    for step, loss in losses.items():
        window = [value for at, value, _ in told if step - 2 < at <= step]
        assert loss == pytest.approx(sum(window) / len(window))
    # Lightning's own mean over replicas, of the minibatches of the last epoch.
    first = oracle()["epochs"].index(CASE.epochs - 1)
    window = [value for step, value, _ in told if step >= first]
    assert table["train"].dropna().iloc[-1] == pytest.approx(sum(window) / len(window))
    rates = table["elastic/samples_per_second"].dropna()
    assert len(rates) == len(ours)
    assert (rates > 0).all()
    assert table["elastic/noise_scale"].notna().any()
    assert table["val"].notna().sum() == len(sizes) // 3
    assert table["train"].notna().sum() == CASE.epochs


def test_killed_and_resumed_on_other_numbers_of_processes(tmp_path, undisturbed):
    """Two processes, then three, then one; the last checkpoints are of steps 5, 10."""
    expected, (_, reference) = oracle(), undisturbed
    with pytest.raises(ReplicaError):
        Backend("cpu", 2).run(fit, tmp_path, 7)
    first = tmp_path / "step=5.ckpt"
    with pytest.raises(ReplicaError):
        Backend("cpu", 3).run(fit, tmp_path, 11, str(first))
    second = tmp_path / "step=10.ckpt"
    [outcome] = Backend("cpu", 1).run(fit, tmp_path, None, str(second))
    assert all(map(torch.equal, outcome["weights"], expected["weights"]))
    assert outcome["global_step"] == len(expected["lrs"])
    assert outcome["epoch"] == CASE.epochs
    steps = zip(outcome["steps"], reference[0]["steps"][10:], strict=True)
    assert all((*one[:2], one[3]) == (*other[:2], other[3]) for one, other in steps)
    # A step that was run twice had the same samples both times.
    for step, samples in global_batches(tmp_path).items():
        once = expected["samples"][step]
        assert samples in (once, sorted(2 * once)), step
    assert len(global_batches(tmp_path)) == len(expected["samples"])


def test_the_state_is_small_safe_and_does_not_know_the_replicas(undisturbed, tmp_path):
    folder, _ = undisturbed
    checkpoint = torch.load(folder / "step=5.ckpt", weights_only=True)
    place = checkpoint["optimizer_states"][0]["elastic"]["sampler"]
    assert (place["epoch"], checkpoint["global_step"]) == (0, 5)
    Backend("cpu", 1).run(fit, tmp_path)
    alone = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    assert alone["optimizer_states"][0]["elastic"]["sampler"] == place
    assert json.dumps(alone["loops"]) == json.dumps(checkpoint["loops"])


def test_it_takes_a_checkpoint_at_the_end_of_an_epoch(tmp_path):
    expected = oracle()
    saves = {"save_top_k": -1, "every_n_epochs": 1}
    for ckpt, num in ((None, 1), (str(tmp_path / "epoch=0.ckpt"), CASE.epochs)):
        sampler, module = sampler_of(), Module()
        callback = lightning.callbacks.ModelCheckpoint(tmp_path, "{epoch}", **saves)
        trainer = trainer_of(
            ElasticStrategy(sampler, CASE.rule, CASE.ref_batchsize),
            callbacks=[callback], enable_checkpointing=True,
        )  # fmt: skip
        trainer.fit_loop.max_epochs = num
        trainer.fit(module, loader_of(sampler, num_workers=1), ckpt_path=ckpt)
    weights = [p.detach() for p in module.parameters()]
    assert all(map(torch.equal, weights, expected["weights"]))
    assert trainer.global_step == len(expected["lrs"])


# --- other promises -----------------------------------------------------------------


class Weighted(Small):
    """Its minibatches' losses are sums of as many tokens as their first sample says."""

    def training_step(self, batch, batch_idx):
        num_tokens = int(batch[0]) + 1
        return {"loss": self.weight * num_tokens, "weight": num_tokens}


def test_token_weights_are_returned_beside_the_loss():
    module = Weighted()
    trainer = small_fit(module, options={"reduction": "sum"})
    # Every token has gradient 1, so every update takes off 1, whatever the lengths.
    assert (trainer.global_step, module.weight.item()) == (3, -3.0)
    with pytest.raises(TypeError, match="needs reduction='sum'"):
        small_fit(Weighted())


def test_the_trace_ends_the_training():
    trainer = small_fit(Small(), (4, 12, 8), max_epochs=-1)
    assert (trainer.global_step, trainer.current_epoch) == (3, 1)
    trainer = small_fit(Small(), (4, 12, 8), max_steps=2)
    assert trainer.global_step == 2
    assert small_fit(Small(), fast_dev_run=True).global_step == 1


def test_gradients_are_clipped_once_a_step():
    module = Small()
    small_fit(module, (24,), options={"max_grad_norm": 0.5})
    assert module.weight.item() == pytest.approx(-0.5)


def test_mixed_precision_in_bfloat16():
    class Mixed(Small):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            outputs = self.linear(batch.float()[:, None])
            assert outputs.dtype == torch.bfloat16
            return outputs.float().mean()

    small_fit(Mixed(), precision="bf16-mixed")


class Wrapped(Small):
    """Wraps a part of itself as users of several processes do."""

    def configure_optimizers(self):
        self.inner = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        return torch.optim.SGD([self.weight, *self.inner.parameters()], 1.0)


def test_a_run_that_max_steps_has_ended_goes_on(tmp_path):
    for max_steps, ckpt in ((5, None), (10, tmp_path / "step=5.ckpt")):
        sampler, module = sampler_of(), Module()
        saves = lightning.callbacks.ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1
        )
        trainer = trainer_of(
            ElasticStrategy(sampler, CASE.rule, CASE.ref_batchsize),
            callbacks=[saves], enable_checkpointing=True, max_steps=max_steps,
        )  # fmt: skip
        trainer.fit(module, loader_of(sampler), ckpt_path=ckpt)
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert trainer.global_step == 10
    whole, sampler = Module(), sampler_of()
    trainer = trainer_of(
        ElasticStrategy(sampler, CASE.rule, CASE.ref_batchsize), max_steps=10
    )
    trainer.fit(whole, loader_of(sampler))
    assert all(map(torch.equal, module.parameters(), whole.parameters()))


class Normalised(Small):
    """Its statistics depend on the samples that a replica has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1, momentum=None)

    def training_step(self, batch, batch_idx):
        return (self.weight * self.norm(batch.double()[:, None].float())).mean()

    def validation_step(self, batch, batch_idx):
        self.seen = self.norm.running_mean.item()


class Meets(Small):
    """Calls a collective in a step, or for an epoch in which one has no minibatch."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, batch_size=4, **self.how)
        return loss


class Stops(lightning.Callback):
    """Stops on one replica alone, and asks all."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        strategy = trainer.strategy
        mine = trainer.global_rank == 1 and batch_idx == 1
        trainer.should_stop = strategy.reduce_boolean_decision(mine, all=False)
        ranks = strategy.all_gather(torch.tensor(float(trainer.global_rank)))
        assert ranks.tolist() == [0.0, 1.0]
        assert strategy.broadcast(f"of {trainer.global_rank}", 1) == "of 1"
        for name, value in {"mean": 0.5, "sum": 1.0, "max": 1.0, "min": 0.0}.items():
            own = torch.tensor(float(trainer.global_rank))
            assert strategy.reduce(own, reduce_op=name).item() == value


def on_two(rank: int) -> dict[str, Any]:
    """Returns what several small runs on two processes have seen or said."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    module = Normalised()
    sampler = vbs.CustomSampler(range(24), [4, 12, 8], minibatch_size=4, verbose=False)
    loader = torch.utils.data.DataLoader(range(24), batch_sampler=sampler)
    validation = torch.utils.data.DataLoader(range(4), batch_size=4)
    trainer = trainer_of(ElasticStrategy(sampler, "constant"))
    trainer.fit(module, loader, validation)
    found["mean"] = module.seen
    found["stopped"] = small_fit(Small(), callbacks=[Stops()]).global_step
    for name, module, trace in (
        ("within", Meets(on_step=True), (8, 12)),
        ("starved", Meets(on_step=False, on_epoch=True), (4, 4)),
        ("wrapped", Wrapped(), (8, 12)),
    ):
        # A process alone in such a run would wait for the other; both fail or neither.
        try:
            small_fit(module, trace)
        except (ValueError, TypeError) as error:
            found[name] = str(error)
        xla_replica.current().barrier()
    return found


def test_two_processes_meet_between_updates_alone():
    first, second = Backend("cpu", 2).run(on_two)
    # 24 samples are seen once: their mean is 11.5, on both.
    assert first["mean"] == second["mean"] == pytest.approx(11.5)
    assert first["stopped"] == second["stopped"] == 2
    assert "replicas run different numbers of minibatches" in first["within"]
    assert "some replica has no minibatch" in first["starved"]
    assert "DistributedDataParallel" in first["wrapped"]
