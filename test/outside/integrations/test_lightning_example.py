"""The example for Lightning as users start, stop and resume it."""

from __future__ import annotations

import importlib.util

import pandas as pd
import pytest
import torch
from support.outside import package
from support.xla_replica.replicas import Backend

from tools.outside import models

if importlib.util.find_spec("lightning"):
    models.import_torchvision()
package("lightning.pytorch")
from examples.lightning import digits  # noqa: E402

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]


def run_example(rank: int, arguments: list[str]) -> pd.DataFrame:
    torch.set_num_threads(1)
    return digits.train(rank, digits.parse(arguments))


def test_the_example_goes_on_with_another_number_of_processes(tmp_path):
    common = ["--no-progress", "--save-every", "4", "--logdir"]
    whole = digits.main([*common, str(tmp_path / "whole"), "--epochs", "3"])
    folder = str(tmp_path / "resumed")
    first = digits.main([*common, folder, "--epochs", "3", "--stop-after", "9"])
    assert first["updates"].sum() == 9
    table, _ = Backend("cpu", 2).run(run_example, [*common, folder, "--epochs", "3"])
    columns = ["epoch", "updates", "smallest batch", "largest", "learning rate"]
    assert table[columns].equals(whole[columns])
    assert table["accuracy (%)"].iloc[-1] > 80
    again = digits.main([*common, folder, "--epochs", "3"])
    assert again.equals(table)
