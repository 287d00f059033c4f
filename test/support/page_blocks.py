"""The pages' blocks of code, and a process that runs those in Python.

It takes a file, and the names of blocks, and writes there what each raises, as JSON.
"""

import ast
import importlib
import inspect
import json
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from support.documents import ROOT, pages, read

FENCE = r"(?ms)^(?:<!-- not run: (.+?) -->\n)?```(?P<language>\w*)\n(.*?)^```$"


class Block(NamedTuple):
    """A fenced block, by the line of its fence; ``reason`` says why it is not run."""

    page: str
    reason: str | None
    language: str
    code: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def all_blocks() -> list[Block]:
    """Returns the blocks of all pages, in every language."""
    found = {page.relative_to(ROOT).as_posix(): read(page) for page in pages()}
    return [
        Block(page, *each.groups(), text.count("\n", 0, each.start("language")) + 1)
        for page, text in found.items()
        for each in re.finditer(FENCE, text)
    ]


# What takes less time than what the pages show.
SMALLER = {
    "num_replicas=8": "num_replicas=1",
    "num_workers=4": "num_workers=1",
    "most=4096": "most=256",
    "@torch.compile ": '@torch.compile(backend="eager") ',
}
COMPLETE = "docs/extending.md"  # whole scripts: they are given nothing
# What the other pages leave out.
IMPORTS = """
import hashlib
from argparse import Namespace
from unittest.mock import Mock

import pandas
import pytest
import torch
import torch.nn.functional as F
from tensorboardX import SummaryWriter
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler
from rigl_xla import RigLScheduler
from variable_batch_size import LinearRuleOptimizer
"""
# The names that a block finds are made when it asks for one, by a function whose
# parameters are other names, which the block may have bound before.
OBJECTS = """
def dataset():
    labels = torch.arange(256) % 4
    vectors = torch.randn(256, 4) / 2 + torch.eye(4)[labels] * 3
    return torch.utils.data.TensorDataset(vectors, labels)

def pruner(model, inner):
    pruner = RigLScheduler(model, inner, 0.5, 2, delta=1, ignore_linear_layers=False)
    for _ in range(2):
        model(torch.randn(8, 4)).square().sum().backward()
        pruner()
    return pruner

def paths():
    texts = pandas.DataFrame({"text": [f"text {i}" for i in range(256)]})
    texts.to_parquet("texts.parquet", row_group_size=16)
    return ["texts.parquet"]

model = lambda: nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 4))
inner = sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
sampler = lambda dataset: vbs.CustomSampler(dataset, "trace.csv", minibatch_size=32)
loader = lambda dataset, sampler: DataLoader(dataset, batch_sampler=sampler)
minibatches = lambda loader: iter(loader)
optimizer = lambda inner, sampler: LinearRuleOptimizer(inner, sampler, ref_batchsize=64)
scheduler = lambda optimizer: LambdaLR(optimizer, lambda _: 1.0)
log = lambda optimizer: vbs.RunLog("run.jsonl", optimizer)
replica = lambda: xla_replica.current()
params = lambda model: dict(model.named_parameters())
grab = lambda dataset, params: GraBSampler(dataset, params)
averaged = lambda model: torch.optim.swa_utils.AveragedModel(model)
args = lambda: Namespace(lr=0.1)
evaluate = lambda: lambda _: 0.5
trace = lambda: "trace.csv"
percent, lr, T_end = lambda: 90.0, lambda: 0.1, lambda: 300
num_epochs = epochs = lambda: 2
batches, step = lambda: range(3), lambda: lambda batch: None
wandb, mlflow = lambda: Mock(), lambda: Mock()  # they are not installed
agreed, save = lambda: lambda request: request is not None, lambda: lambda: None
"""
# Other objects, for blocks with these words.
SPECIAL = {
    "ignore_index=-100": """
def dataset():
    tokens = torch.arange(256 * 6).reshape(256, 6) % 8
    targets = torch.where(torch.rand(256, 6) < 0.3, -100, tokens)
    return torch.utils.data.TensorDataset(tokens, targets)

model = lambda: nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
""",
    "pad_minibatches": "trace = lambda: [40, 56, 72]",
    "T_end, skip_step": """
def model():
    convolutions = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 16, 4)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), *convolutions, nn.Flatten())
""",
    "join_step()": "optimizer = lambda inner, sampler: LinearRuleOptimizer("
    "inner, sampler, ref_batchsize=64, lockstep=True)",
    "fully_shard(": """
def model():
    store = torch.distributed.FileStore("store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))
    model.blocks = list(model)
    return model
""",
}
TRAINING = """
for x, y in DataLoader(dataset, batch_sampler=sampler):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
# What uses what a block has made or defined, by words of the block.
THEN = {
    "fidelity=": "next(iter(loader))",
    "order=grab)\n...": """
for x, y in DataLoader(dataset, batch_sampler=sampler):
    with grab.record(model):
        losses = F.cross_entropy(model(x), y, reduction="none")
    grab.backward(losses)
    optimizer.step()
""",
    "wandb.init": f"optimizer.attach(log){TRAINING}mlflow.log_metrics.assert_called()",
    "BatchSizeController(": TRAINING,
    "= LinearRuleOptimizer(sgd": TRAINING,
    "IndexShuffle(": "assert len({i for batch in sampler for i in batch}) > 200",
    "p.grad).abs()": "assert abs(pruner.report().sparsity - 0.9) < 1e-3",
    "rule.update": "assert abs(scaled.lr - 2e-3) < 1e-9",
    "sampler.backward(losses)": "assert sampler.num_seen == len(dataset)",
    "class Interleaved": """
sampler = vbs.CustomSampler(dataset, trace, order=Interleaved())
assert next(iter(sampler))[:3] == [0, 128, 1]
""",
    "from_parquet(": "assert len(next(iter(loader))['text']) == 32",
    "SeededDataset(": "next(iter(loader))",
    "catch_signals()": """
xla_replica.request_stop("asked", 143)
with pytest.raises(xla_replica.Stopped):
    train(0)
""",
}


class Names(dict):
    """The names of a block: its objects are made before it, or from what it binds."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self._makers: dict[str, Any] = {}
        if block.page == COMPLETE:
            return
        exec(IMPORTS, self)
        scope = dict(self)
        for words, objects in {"": OBJECTS, **SPECIAL}.items():
            if words in block.code:
                exec(objects, scope)
        self._makers = {name: scope[name] for name in scope.keys() - self.keys()}
        nodes = ast.walk(ast.parse(block.code))
        used = [node for node in nodes if isinstance(node, ast.Name)]
        bound = {each.id for each in used if isinstance(each.ctx, ast.Store)}
        for name in {each.id: None for each in used if each.id in self._makers}:
            if not self._follows(name, bound):
                self[name]

    def _follows(self, name: str, bound: set[str]) -> bool:
        needed = inspect.signature(self._makers[name]).parameters
        return name in bound or any(self._follows(each, bound) for each in needed)

    def __missing__(self, name: str) -> Any:
        make = self._makers[name]  # a KeyError lets Python look elsewhere
        needed = inspect.signature(make).parameters
        self[name] = made = make(*[self[each] for each in needed])
        if name == "model":
            self["weights"] = [p.detach().clone() for p in made.parameters()]
        return made


def run(block: Block) -> None:
    """Runs a block in this process and folder; one that trains must change weights."""
    import torch

    torch.manual_seed(0)
    if block.page != COMPLETE:
        rows = "".join(f"{n},{32 + 32 * (n % 3)}\n" for n in range(200))
        Path("trace.csv").write_text("step,batchsize\n" + rows)
    code = block.code
    for shown, smaller in SMALLER.items():
        code = code.replace(shown, smaller)
    for words, more in THEN.items():
        code += f"\n{more}\n" if words in code else ""
    names = Names(block)
    code = "\n" * block.line + code  # for the lines of a traceback
    exec(compile(code, ROOT / block.page, "exec", dont_inherit=True), names)
    if "optimizer.step()" in code and "weights" in names:
        assert not all(
            torch.equal(getattr(now, "full_tensor", now.detach)(), before)
            for now, before in zip(names["model"].parameters(), names["weights"])
        ), "nothing was learnt"


def run_alone(block: Block, file: Path) -> None:
    """Runs a block in a folder of its own, and writes what it raises into a file."""
    warnings.simplefilter("error", UserWarning)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            run(block)
        except BaseException:
            file.write_text(traceback.format_exc())
            raise


if __name__ == "__main__":
    # Each has a process of its own, which need not import torch again.
    importlib.import_module("torch._dynamo")  # which others import when needed
    exec(IMPORTS, {})
    file, names = Path(sys.argv[1]), sys.argv[2:]
    raised, fork = {}, multiprocessing.get_context("fork")
    for each in [each for each in all_blocks() if each.name in names]:
        file.write_text("it has died")
        process = fork.Process(target=run_alone, args=(each, file))
        process.start()
        process.join()
        if process.exitcode:
            raised[each.name] = file.read_text()
    file.write_text(json.dumps(raised))
