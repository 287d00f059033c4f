"""Trains on text that is streamed from Parquet files, on any number of replicas.

    python examples/streaming/parquet_text.py             # run again: resumes
    python examples/streaming/parquet_text.py --num-replicas 3 --device cpu
    python examples/streaming/parquet_text.py --data my_files --run runs/mine

Files are read by row groups, and shuffled in windows of a few of them. The batch size
follows a trace, and every step has the same texts on any number of replicas; a run that
goes on within an epoch reads the row groups of its window, and none of those before.
Without files, the first run writes some, from the source code of Python's library.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica


def write_files(folder, num_files=4, num_texts=8192, length=128):
    """Writes Parquet files with the column `text`, a few lines of code in a row."""
    import pyarrow.parquet

    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        texts += [source[i : i + length] for i in range(0, len(source), length)]
    texts = texts[:num_texts]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        table = pyarrow.table({"text": texts[number::num_files]})
        path = folder / f"part-{number}.parquet"
        pyarrow.parquet.write_table(table, path, 128)  # rows of a row group


class ByteModel(nn.Module):
    """Predicts every byte from the eight before it: a convolution over embeddings."""

    def __init__(self, width=64, reach=8):
        super().__init__()
        self.embedding = nn.Embedding(257, width)  # 256 is the beginning of a text
        self.mix = nn.Conv1d(width, 4 * width, reach)
        self.output = nn.Linear(4 * width, 256)
        self.reach = reach

    def forward(self, texts):  # (B, T) bytes -> (B, T, 256), from those before each
        before = F.pad(texts[:, :-1], (self.reach, 0), value=256)
        mixed = self.mix(self.embedding(before).transpose(1, 2))
        return self.output(F.relu(mixed).transpose(1, 2))


class Collate:
    """Makes one tensor of texts: bytes, cut or filled up with spaces."""

    def __init__(self, length):
        self.length = length

    def __call__(self, rows):
        texts = [row["text"].encode()[: self.length].ljust(self.length) for row in rows]
        return torch.tensor([list(text) for text in texts])


def train(rank, args):
    replica = xla_replica.current()
    files = sorted(args.data.glob("*.parquet"))
    dataset = vbs.BlockDataset.from_parquet(files, columns=["text"])
    sampler = vbs.CustomSampler(
        dataset,
        args.trace,
        minibatch_size=32,
        order=dataset.shuffled(window=args.window, seed=args.seed),
    )
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=Collate(args.length))
    with replica.seeded(args.seed):  # the same weights on every replica
        model = ByteModel().to(replica.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = vbs.RootRuleOptimizer(optimizer, sampler, ref_batchsize=32)
    log = vbs.RunLog(args.run / "run.jsonl", optimizer)
    optimizer.attach(log)
    saver = vbs.Checkpointer(
        args.run,
        optimizer,
        every_updates=50,
        settings={"lr": args.lr, "length": args.length},
        model=model,
        log=log,
    )
    saver.load()  # where nothing was saved, training begins at 0
    optimizer.attach(saver)

    num_steps = sampler.schedule.steps(args.epochs - 1).stop
    first = sampler.plan.first_step + sampler.plan.start_step
    bar = tqdm(total=num_steps, initial=first, disable=rank > 0, unit="step")
    optimizer.attach(lambda update: bar.update())
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for texts in replica.loader(loader):
            loss = F.cross_entropy(model(texts).flatten(0, 1), texts.flatten())
            loss.backward()
            log.add(loss)
            optimizer.step()
        saver.save()
    bar.close()
    log.close()
    if replica.is_primary:
        print(f"replica 0 has read {dataset.num_blocks_read} row groups")
        show(args.run / "run.jsonl")


def show(path):
    """Prints how the run went: ten rows of its log, also of earlier parts."""
    updates = vbs.read_run(path).updates
    updates = updates[updates["loss"].notna()]
    rows = updates.iloc[torch.linspace(0, len(updates) - 1, 10).long().tolist()]
    print(rows[["step", "batch_size", "samples", "loss"]].to_string(index=False))


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, here = parser.add_argument, Path(__file__).parent
    add("--data", type=Path, default=Path("texts"), help="a folder (default: texts)")
    add("--run", type=Path, default=Path("run"), help="saves there (default: run)")
    add("--trace", default=here / "trace.csv", help="default: that of this folder")
    add("--epochs", type=int, default=2, help="default: 2")
    add("--window", type=int, default=8, help="row groups (default: 8)")
    add("--length", type=int, default=128, help="bytes of a text (default: 128)")
    add("--lr", type=float, default=2e-3, help="for 32 texts (default: 0.002)")
    add("--seed", type=int, default=0, help="of order and weights (default: 0)")
    add("--num-replicas", type=int, help="default: all chips or GPUs, else 1")
    add("--device", choices=xla_replica.DEVICES, help="default: the best there is")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    if not list(args.data.glob("*.parquet")):
        write_files(args.data)
    xla_replica.launch(train, (args,), args.num_replicas, args.device)


if __name__ == "__main__":
    main()
