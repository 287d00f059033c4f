"""Trains digits by Lightning's trainer, with the batch sizes of a trace.

    cd examples/lightning
    python digits.py                     # run again: resumes, or prints the table
    python digits.py --num-replicas 3    # the same batches on three processes
    torchrun --nproc_per_node 2 digits.py

Stop it whenever you like: it goes on from the last checkpoint, on any number of
processes. It needs the extra `lightning`. docs/trainers.md explains the strategy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica

TRACE = Path(__file__).with_name("trace.csv")


def train(rank: int, args: argparse.Namespace) -> pd.DataFrame:
    """Trains on one replica; returns a row for every epoch."""
    # Here: `--help` works without Lightning, too.
    import lightning.pytorch as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import TensorBoardLogger

    from examples.lightning.classifier import Classifier, Log, load
    from variable_batch_size.integrations.lightning import ElasticStrategy

    replica = xla_replica.current()
    training, validation = load()
    sampler = vbs.CustomSampler(
        training, args.trace, minibatch_size=32, on_end="cycle", verbose=False
    )
    L.seed_everything(0, verbose=False)
    num_updates = sampler.schedule.steps(args.epochs - 1).stop
    module = Classifier(args.lr, num_updates)
    folder = Path(args.logdir)
    saves = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=args.save_every, save_last=True
    )
    trainer = L.Trainer(
        strategy=ElasticStrategy(sampler, args.rule, ref_batchsize=32, noise=True),
        accelerator=replica.device.type,
        max_epochs=args.epochs,
        max_steps=args.stop_after,
        logger=TensorBoardLogger(folder),  # or any other of Lightning's
        log_every_n_steps=5,
        callbacks=[saves, Log(folder / "run.jsonl")],
        enable_progress_bar=args.progress,
        enable_model_summary=False,
    )
    loader = DataLoader(training, batch_sampler=sampler)
    evaluation = DataLoader(validation, batch_size=len(validation))
    last = folder / "last.ckpt"
    ckpt_path = trainer.strategy.broadcast(str(last) if last.exists() else None)
    trainer.fit(module, loader, evaluation, ckpt_path=ckpt_path)
    trainer.strategy.barrier()  # replica 0 has written its last line
    return table_of(folder / "run.jsonl")


def table_of(path: Path) -> pd.DataFrame:
    """Returns a row for every epoch of a run, from its log."""
    updates = vbs.read_run(path).updates
    if "accuracy" not in updates:  # stopped before the first evaluation
        updates["accuracy"] = float("nan")
    epochs = updates.groupby("epoch")
    return pd.DataFrame(
        {
            "updates": epochs.size(),
            "smallest batch": epochs["batch_size"].min(),
            "largest": epochs["batch_size"].max(),
            "learning rate": epochs["lr"].mean().round(4),
            "noise scale": epochs["noise_scale"].last().round(1),
            "accuracy (%)": epochs["accuracy"].last().round(2),
        }
    ).reset_index()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=int, default=8, help="default: 8")
    add("--lr", type=float, default=0.02, help="for 32 samples (default: 0.02)")
    add("--rule", default="linear", help="of the learning rate (default: linear)")
    add("--trace", default=TRACE, help="default: trace.csv beside this")
    add("--logdir", default="runs/lightning", help="default: runs/lightning")
    add("--save-every", type=int, default=10, help="updates (default: 10)")
    add("--stop-after", type=int, default=-1, help="updates (default: the end)")
    add("--num-replicas", type=int, help="processes (default: 1, or all GPUs)")
    add("--no-progress", dest="progress", action="store_false", help="no progress bar")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    args = parse(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table, *_ = xla_replica.launch(train, (args,), args.num_replicas, device)
    return table


if __name__ == "__main__":
    print(main().to_string(index=False))
