"""Lightning trains under a trace: on any processes, killed and resumed."""

import json
import math
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.documents import ROOT, block
from support.outside import package
from support.scripts import python, written
from support.variable_batch_size import elastic
from support.variable_batch_size.resuming import loss_of
from support.xla_replica.replicas import Backend
from support.xla_replica.torchrun import LAUNCHER
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import variable_batch_size as vbs
import xla_replica
from examples.lightning import digits

lightning = package("lightning.pytorch")
from variable_batch_size.integrations.lightning import ElasticStrategy  # noqa: E402

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def trainer_of(sampler: vbs.CustomSampler, strategy: Any = (), **options: Any) -> Any:
    options = {"enable_checkpointing": False, "max_epochs": 2, **options}
    strategy = ElasticStrategy(sampler, **dict(strategy))
    return lightning.Trainer(strategy=strategy, accelerator="cpu", **QUIET | options)


# Two epochs of different numbers of steps, of 1 to 9 minibatches: some replicas are
# idle in some steps, the first and the last of an epoch among them.
TRACE, DECAY = (4, 36, 8, 4, 12, 32, 20, 4, 48, 40, 4), 0.5
CASE = elastic.Case(TRACE, 2, "sgd-heavy-ball", exact=True)
STEPS = [*elastic.batches(CASE)]
LENGTHS = [[epoch for epoch, _ in STEPS].count(epoch) for epoch in range(CASE.epochs)]


class Module(lightning.LightningModule):
    """What a user writes; it keeps step, loss and samples of every minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.model, _, _ = elastic.make(CASE)
        self.told: list[tuple[int, float, list[int]]] = []

    def training_step(self, batch, batch_idx):
        numbers, x, y = batch
        loss = loss_of(self.model, x, y)
        self.told.append((self.trainer.global_step, loss.item(), numbers.tolist()))
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        _, x, y = batch
        self.log("val", ((self.model(x)[:, 0] - y) ** 2).mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = elastic.OPTIMIZERS[CASE.optimizer](self.parameters(), CASE.lr)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
        return [optimizer], [{"scheduler": decay, "interval": "step"}]


class Seen(lightning.Callback):
    """Keeps what callbacks are told, and kills the process after an update."""

    def __init__(self, kill_after: int) -> None:
        self.steps, self.validated, self.num_batches = [], [], []
        self.kill_after = kill_after

    def on_train_epoch_start(self, trainer, module):
        self.num_batches.append(trainer.num_training_batches)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((trainer.global_step, batch_idx, lr, len(batch)))
        if trainer.global_step == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self, trainer, module):
        self.validated.append(trainer.global_step)


def fit(rank: int, folder: Path, ckpt=None, kill_after=0, **options) -> dict[str, Any]:
    torch.set_num_threads(1)
    _, x, y = elastic.make(CASE)
    data = torch.utils.data.TensorDataset(torch.arange(len(x)), x, y)
    sampler, module, seen = elastic.sampler_of(CASE, data), Module(), Seen(kill_after)
    always = {"save_top_k": -1, "save_on_train_epoch_end": True}
    saving = partial(lightning.callbacks.ModelCheckpoint, folder, **always)
    saves = saving("{step}", every_n_train_steps=5), saving("{epoch}", every_n_epochs=1)
    strategy = {"rule": CASE.rule, "ref_batchsize": CASE.ref_batchsize, "noise": True}
    trainer = trainer_of(
        sampler, strategy,
        logger=lightning.loggers.CSVLogger(folder, name="log", version=""),
        callbacks=[seen, *saves], enable_checkpointing=True, val_check_interval=3,
        check_val_every_n_epoch=None, num_sanity_val_steps=1, log_every_n_steps=2,
        **options,
    )  # fmt: skip
    loader = DataLoader(data, batch_sampler=sampler, num_workers=rank % 2)
    trainer.fit(module, loader, DataLoader(data, batch_size=64), ckpt_path=ckpt)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "weights": [p.detach() for p in module.parameters()], "metrics": metrics,
        "end": (trainer.global_step, trainer.current_epoch), "told": module.told,
        **vars(seen),
    }  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, Backend("cpu", 3).run(fit, folder)


def check_end(outcome, reference, first: int) -> None:
    assert all(map(torch.equal, outcome["weights"], reference["weights"]))
    assert outcome["end"] == reference["end"]
    ours, expected = ([step[:3] for step in o["steps"]] for o in (outcome, reference))
    assert ours == expected[first:]


def test_it_is_large_batch_training_that_counts_updates_on_every_replica(undisturbed):
    weights, updates = elastic.large_batch_run(CASE, loss_of, None, DECAY)
    outcomes, steps = undisturbed[1], [[] for _ in updates]
    for step, _, samples in [each for outcome in outcomes for each in outcome["told"]]:
        steps[step] += samples
    assert [*map(sorted, steps)] == [sorted(rows.tolist()) for _, rows in STEPS]
    assert len(set(LENGTHS)) > 1
    for rank, outcome in enumerate(outcomes):
        torch.testing.assert_close(outcome["weights"], weights, rtol=1e-12, atol=1e-14)
        check_end(outcome, outcomes[0], 0)
        assert outcome["end"] == (len(updates), CASE.epochs)
        assert outcome["num_batches"] == LENGTHS
        counted, indices, lrs, nums = zip(*outcome["steps"])
        assert [*counted] == [*range(1, len(STEPS) + 1)]
        assert [*indices] == [i for length in LENGTHS for i in range(length)]
        assert [*nums] == [math.ceil((len(r) // 4 - rank) / 3) for _, r in STEPS]
        # Callbacks run after the scheduler: the rates are those of the next update.
        assert [*lrs] == [CASE.lr * DECAY**step for step in counted]
        assert outcome["validated"] == [0, *range(3, len(STEPS) + 1, 3)]
        assert outcome["metrics"] == outcomes[0]["metrics"]
    assert outcomes[1]["steps"][0][3] == 0  # idle in the first step


def test_the_trainers_logger_has_its_own_and_our_numbers(undisturbed):
    folder, outcomes = undisturbed
    _, updates = elastic.large_batch_run(CASE, loss_of, None, DECAY)
    table = pd.read_csv(folder / "log" / "metrics.csv").set_index("step")
    told = [each[:2] for outcome in outcomes for each in outcome["told"]]
    logged = table[table["elastic/batch_size"].notna()]
    assert [*logged.index] == [*range(0, len(updates), 2)]
    for step, row in logged.iterrows():
        _, _, size, (lr,) = updates[step]
        window = [loss for at, loss in told if step - 2 < at <= step]
        expected = size, lr, sum(window) / len(window)
        names = ("elastic/batch_size", "elastic/lr", "elastic/loss")
        assert [row[name] for name in names] == pytest.approx(expected)
        assert row["elastic/samples_per_second"] > 0
    assert table["elastic/noise_scale"].notna().any()
    # Lightning's own mean over replicas, of the minibatches of the last epoch.
    window = [loss for step, loss in told if step >= LENGTHS[0]]
    assert table["train"].dropna().iloc[-1] == pytest.approx(sum(window) / len(window))
    assert table["val"].notna().sum() == len(updates) // 3


def test_killed_and_resumed_on_other_numbers_of_processes(tmp_path, undisturbed):
    """Two processes, then three, then one; the last checkpoints are of steps 5, 10."""
    folder, reference = undisturbed
    with pytest.raises(xla_replica.ReplicaError):
        Backend("cpu", 2).run(fit, tmp_path, None, 7)
    with pytest.raises(xla_replica.ReplicaError):
        Backend("cpu", 3).run(fit, tmp_path, tmp_path / "step=5.ckpt", 11)
    check_end(fit(0, tmp_path, tmp_path / "step=10.ckpt"), reference[0], 10)
    # The state does not know the replicas, and loads as weights do.
    paths = folder / "step=5.ckpt", tmp_path / "step=5.ckpt"
    own, other = (torch.load(path, weights_only=True) for path in paths)
    assert json.dumps(own["loops"]) == json.dumps(other["loops"])
    places = [s["optimizer_states"][0]["elastic"]["sampler"] for s in (own, other)]
    assert places[0] == places[1]
    assert (places[0]["epoch"], own["global_step"]) == (0, 5)


@pytest.mark.parametrize(
    ("ended", "name"), [({"max_epochs": 1}, "epoch=0"), ({"max_steps": 5}, "step=5")]
)
def test_a_run_that_has_ended_goes_on(tmp_path, undisturbed, ended, name):
    first = fit(0, tmp_path, **ended)["end"][0]
    assert first == ended.get("max_steps", LENGTHS[0])
    check_end(fit(0, tmp_path, tmp_path / f"{name}.ckpt"), undisturbed[1][0], first)


class Small(lightning.LightningModule):
    """One weight, whose gradients are chosen; ``how`` its loss is logged."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.weight, self.how = torch.nn.Parameter(torch.zeros(())), how

    def training_step(self, batch, batch_idx):
        loss = self.weight * batch.float().mean()
        if self.how:
            self.log("loss", loss, sync_dist=True, **self.how)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


def small_fit(module, trace=(4, 12, 8), val=None, ckpt=None, loader=None, **options):
    """Returns the trainer after the one epoch of the trace; minibatches of four."""
    sampler = vbs.CustomSampler(range(24), [*trace], minibatch_size=4, verbose=False)
    loader = loader or DataLoader(range(24), batch_sampler=sampler)
    strategy = {"rule": "constant", **options.pop("strategy", {})}
    trainer = trainer_of(sampler, strategy, **options)
    trainer.fit(module, loader, val, ckpt_path=ckpt)
    return trainer


PRELUDE = """import os
from test_lightning import DataLoader, Small, vbs
os.chdir(os.path.dirname(os.path.abspath(__file__)))
dataset, validation_loader, module = range(256), None, Small()
"""
WRITES = '    os.write(1, f"WEIGHT {module.weight.item()}\\n".encode())'


def test_the_page_s_script_runs_under_torchrun(tmp_path):
    (tmp_path / "trace.csv").write_text("step,batchsize\n" + "0,32\n1,64\n" * 20)
    code = f"{PRELUDE}{block('docs/trainers.md', 'python', 'L.Trainer(')}\n{WRITES}"
    path = os.pathsep.join(map(str, [ROOT, ROOT / "test", Path(__file__).parent]))
    done = python(written(tmp_path, code), command=LAUNCHER, PYTHONPATH=path)
    first, second = re.findall("WEIGHT (.*)", done.stdout)
    assert first == second
    assert float(first) < 0
    assert [*tmp_path.glob("lightning_logs/*/checkpoints/*.ckpt")]


class Weighted(Small):
    """Its minibatches' losses are sums of as many tokens as their first sample says."""

    def training_step(self, batch, batch_idx):
        num_tokens = int(batch[0]) + 1
        return {"loss": self.weight * num_tokens, "weight": num_tokens}


def test_token_weights_are_returned_beside_the_loss():
    trainer = small_fit(module := Weighted(), strategy={"reduction": "sum"})
    # Every token has gradient 1, so every update takes off 1, whatever the lengths.
    assert (trainer.global_step, module.weight.item()) == (3, -3.0)
    with pytest.raises(TypeError, match="needs reduction='sum'"):
        small_fit(Weighted())


def test_the_trace_ends_the_training_and_gradients_are_clipped_once_a_step():
    trainer = small_fit(Small(), max_epochs=-1)
    assert (trainer.global_step, trainer.current_epoch) == (3, 1)
    assert small_fit(Small(), max_steps=2).global_step == 2
    assert small_fit(Small(), fast_dev_run=True).global_step == 1
    small_fit(module := Small(), (24,), strategy={"max_grad_norm": 0.5})
    assert module.weight.item() == pytest.approx(-0.5)


class Mixed(Small):
    def training_step(self, batch, batch_idx):
        outputs = torch.nn.functional.linear(batch[:, None], self.weight[None, None])
        assert outputs.dtype == torch.bfloat16
        return outputs.float().mean()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert len(batch) == 4  # of one minibatch
        return batch.float()


def test_mixed_precision_in_bfloat16_and_hooks_of_minibatches():
    assert small_fit(Mixed(), precision="bf16-mixed").global_step == 3


def test_asked_to_stop_it_saves_by_lightnings_own_callback(tmp_path):
    kinds, end = lightning.callbacks, lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    saves = kinds.ModelCheckpoint(tmp_path, "{step}", save_on_exception=True)
    stops = kinds.LambdaCallback(on_train_batch_end=end)
    with pytest.raises(lightning.utilities.exceptions.SIGTERMException):
        small_fit(Small(), callbacks=[stops, saves], enable_checkpointing=True)
    small_fit(module := Small(), ckpt=tmp_path / "step=1.ckpt")
    small_fit(whole := Small())
    assert torch.equal(module.weight, whole.weight)


class Normalised(Small):
    """Its statistics depend on the samples that a replica has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def training_step(self, batch, batch_idx):
        return (self.weight * self.norm(batch.float()[:, None])).mean()

    def validation_step(self, batch, batch_idx):
        self.seen = self.norm.running_mean.item()


class Stops(lightning.Callback):
    """Stops on one replica alone, and asks all."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        strategy = trainer.strategy
        mine = trainer.global_rank == 1 and batch_idx == 1
        trainer.should_stop = strategy.reduce_boolean_decision(mine, all=False)
        own = torch.tensor(float(trainer.global_rank))
        assert strategy.all_gather(own).tolist() == [0.0, 1.0]
        assert strategy.broadcast(f"of {trainer.global_rank}", 1) == "of 1"
        for name, value in {"mean": 0.5, "sum": 1.0, "max": 1.0, "min": 0.0}.items():
            assert strategy.reduce(own, reduce_op=name).item() == value


class Sharded(Small):
    def configure_model(self):
        self.inner = fully_shard(torch.nn.Linear(2, 2))


def on_two(rank: int, folder: Path) -> dict[str, Any]:
    """Returns what several small runs on two processes have seen or said."""
    torch.set_num_threads(1)
    module = Normalised()
    trainer = small_fit(module, val=DataLoader(range(4), batch_size=4))
    trainer.save_checkpoint(folder / "saved.ckpt")
    found = {"mean": module.seen}
    found["stopped"] = small_fit(Small(), callbacks=[Stops()]).global_step
    found["said"] = ""
    logs = {"on_step": False, "on_epoch": True}
    pairs = (Small(on_step=True), (8, 12)), (Small(**logs), (4, 4))
    for module, trace in *pairs, (Sharded(), (8, 12)):
        try:  # one that has no minibatch in the epoch does not fail
            small_fit(module, trace)
        except ValueError as error:
            found["said"] += str(error)
        xla_replica.current().barrier()
    return found


def test_two_processes_meet_between_updates_alone(tmp_path):
    first, second = Backend("cpu", 2).run(on_two, tmp_path)
    # Of what each has seen, on both, and in the checkpoint.
    assert first["mean"] == second["mean"] > 0
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    assert saved["norm.running_mean"].item() == first["mean"]
    assert first["stopped"] == second["stopped"] == 2
    assert "collectives within training_step" in first["said"]
    assert "some replica has no minibatch" in first["said"]
    assert "fully_shard: write a loop" in first["said"]


class Tuned(Small):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2, affine=True)
        self.backbone = torch.nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        return self.weight + self.backbone(batch.float()[:, None]).square().mean()

    def configure_optimizers(self):
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.SGD(trained, 0.01, momentum=0.5)


def test_a_run_that_unfreezes_is_resumed_before_that_and_refused_after(tmp_path):
    """Lightning freezes what was trained where the checkpoint was saved."""
    callback = partial(lightning.callbacks.BackboneFinetuning, 1)
    saves = lightning.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    options = {"trace": [4, 12, 8] * 3, "max_epochs": 3}
    saving = {"callbacks": [callback(), saves], "enable_checkpointing": True}
    small_fit(whole := Tuned(), **options, **saving)
    before, after = tmp_path / "epoch=0.ckpt", tmp_path / "epoch=1.ckpt"
    small_fit(resumed := Tuned(), ckpt=before, callbacks=[callback()], **options)
    assert not torch.equal(whole.backbone[0].weight, Tuned().backbone[0].weight)
    expected = whole.state_dict()
    for name, value in resumed.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=name)
    with pytest.raises(ValueError, match="frozen parameters was"):
        small_fit(Tuned(), ckpt=after, callbacks=[callback()], **options)


# --- what a trace cannot carry -------------------------------------------------------


def replan(trainer, *_: Any) -> None:
    trainer.strategy.sampler.ledger.replan(trainer.strategy.sampler.schedule)


CHANGES = lightning.callbacks.LambdaCallback(on_train_batch_end=replan)
ACCUMULATES = lightning.callbacks.GradientAccumulationScheduler({0: 2})
HALF = lightning.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(("attributes", "options", "says"), [
    ({}, {"accumulate_grad_batches": 2}, "the trace says"),
    ({}, {"callbacks": [ACCUMULATES]}, "the trace says"),
    ({}, {"gradient_clip_val": 1.0}, "pass max_grad_norm="),
    ({}, {"plugins": [HALF]}, "use bf16-mixed"),
    ({"automatic_optimization": False}, {}, "return a loss"),
    ({}, {"sync_batchnorm": True}, "statistics"),
    ({"on_before_batch_transfer": print}, {}, "use on_after_batch_transfer"),
    ({}, {"devices": 2}, "with torchrun"),
    ({"training_step": lambda *_: None}, {}, r"0 \* loss"),
    ({}, {"callbacks": [CHANGES]}, "replay the decided trace"),
])  # fmt: skip
def test_what_a_trace_cannot_carry_is_refused(attributes, options, says):
    module = type("Module", (Small,), attributes)()
    with pytest.raises(ValueError, match=f"not supported under a trace.*{says}"):
        small_fit(module, **options)


def test_another_loader_and_replicas_on_xla_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="batch_sampler=sampler"):
        small_fit(Small(), loader=DataLoader(range(8), batch_size=4))
    monkeypatch.setattr(xla_replica, "current", type("Lazy", (), {"is_lazy": True}))
    with pytest.raises(ValueError, match="write a loop"):
        ElasticStrategy(None)


@pytest.mark.parametrize("every", [2, None])  # within an epoch, and at its end
def test_a_checkpoint_of_another_strategy_is_refused(tmp_path, every):
    kinds = lightning.callbacks.ModelCheckpoint
    saves = kinds(tmp_path, "plain", every_n_train_steps=every)
    options = {"accelerator": "cpu", "max_epochs": 1, "callbacks": [saves]}
    plain = lightning.Trainer(**QUIET, **options)
    plain.fit(Small(), DataLoader(range(24), batch_size=8))
    with pytest.raises(ValueError, match="load an elastic checkpoint"):
        small_fit(Small(), [8] * 6, ckpt=tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="begins epoch 1 after 2 updates"):
        small_fit(Small(), [8] * 6, limit_train_batches=2)


def run_example(rank: int, arguments: list[str]) -> pd.DataFrame:
    return digits.train(rank, digits.parse(arguments))  # this file is imported first


def test_the_example_goes_on_with_another_number_of_processes(tmp_path):
    common = ["--no-progress", "--save-every", "4", "--epochs", "3", "--logdir"]
    whole = digits.main([*common, str(tmp_path / "whole")])
    resumed = [*common, str(tmp_path / "resumed")]
    assert digits.main([*resumed, "--stop-after", "9"])["updates"].sum() == 9
    table, _ = Backend("cpu", 2).run(run_example, resumed)
    columns = ["epoch", "updates", "smallest batch", "largest", "learning rate"]
    assert table[columns].equals(whole[columns])
    assert table["accuracy (%)"].iloc[-1] > 80
    assert digits.main(resumed).equals(table)
