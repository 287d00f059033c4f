"""`Checkpointer`: what is in a checkpoint, and which is the best one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.variable_batch_size.checkpointed import Training
from torch import nn

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.checkpoint import files


def saved(training: Training, num_updates: int, metric=None) -> None:
    training.checkpointer.num_updates = num_updates
    training.checkpointer.save(metric)


def test_the_best_one_is_kept(tmp_path, caplog):
    training = Training(tmp_path, keep=2, best="max")
    for number, metric in enumerate((50.0, 90.0, 70.0, float("nan"), 90.0), start=1):
        saved(training, number, metric)
    assert "not finite" in caplog.text
    assert [f.num_updates for f in files.saved_files(tmp_path)] == [5, 4]
    (best,) = files.saved_files(tmp_path, "best")
    assert best.num_updates == 2
    again = Training(tmp_path, keep=2, best="max")
    assert again.checkpointer.load().best == 90.0
    saved(again, 6, 89.0)
    assert files.saved_files(tmp_path, "best") == [best]
    saved(again, 7, 91.0)
    assert files.saved_files(tmp_path, "best")[0].num_updates == 7
    assert len(list(tmp_path.iterdir())) == 3
    assert again.checkpointer.load(best=True).num_updates == 7


def several_modules(rank: int, folder: Path) -> list[torch.Tensor]:
    training = Training(folder)
    norms = {name: nn.BatchNorm1d(2) for name in "ab"}
    for norm in norms.values():
        norm.running_mean.fill_(float(rank + 1))
    checkpointer = vbs.Checkpointer(
        folder, training.optimizer, model=training.model, **norms
    )
    training.optimizer._loop.num_seen = 1
    checkpointer.save()
    return [norm.running_mean for norm in norms.values()]


def test_buffers_of_all_modules_are_averaged(tmp_path):
    for means in xla_replica.launch(several_modules, (tmp_path,), 2, "cpu"):
        for mean in means:
            torch.testing.assert_close(mean, torch.full((2,), 1.5))


def test_states_keep_their_kind(tmp_path):
    """Such as the version that a module checks, and the Counter of MultiStepLR."""
    training = Training(tmp_path)
    milestones = torch.optim.lr_scheduler.MultiStepLR(training.optimizer.inner, [2, 2])
    checkpointer = vbs.Checkpointer(
        tmp_path, training.optimizer, model=training.model, milestones=milestones
    )
    parts = torch.load(checkpointer.save())["parts"]
    assert parts["model"]._metadata[""]["version"] == 1
    assert parts["milestones"]["milestones"].elements
    assert parts["milestones"]["milestones"] == {2: 2}


class Keeper:
    """A part that goes on to use the tensors that it has loaded."""

    kept = torch.ones(1000)

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_nothing_of_the_file_is_used_after_loading(tmp_path):
    """Pages of a file that another host deletes are gone."""
    keeper = Keeper()
    training = Training(tmp_path, parts={"keeper": keeper})
    training.train()
    restored = Training(tmp_path, parts={"keeper": keeper}).checkpointer.load()
    assert restored.path.name not in Path("/proc/self/maps").read_text()
    assert keeper.kept is not Keeper.kept


def test_the_best_one_may_be_the_smallest(tmp_path):
    training = Training(tmp_path, best="min")
    for number, metric in enumerate((2.0, 1.0, 3.0), start=1):
        saved(training, number, metric)
    again = Training(tmp_path, best="min").checkpointer
    assert again.load(best=True).num_updates == 2
    assert again.load().num_updates == 3
