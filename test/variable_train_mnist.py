"""Trains handwritten digits while a trace changes the global batch size at every step.

    python test/variable_train_mnist.py                      # 8 replicas of this CPU
    python test/variable_train_mnist.py --trace my.csv --rule root
    python test/variable_train_mnist.py --rule adascale --iterations 400
    python test/variable_train_mnist.py --checkpoint runs/a  # stop it, and resume it
    python test/variable_train_mnist.py --trace 64 --closed-loop 32:512
    torchrun --rdzv_backend c10d --nproc_per_node 2 test/variable_train_mnist.py
    PJRT_DEVICE=TPU python test/variable_train_mnist.py      # every chip of a TPU VM

The lines that make it elastic are marked with `# elastic`.
"""

import argparse
import logging
import math
import os
import sys
import time
from pathlib import Path

import handwritten_digits
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # a checkout that was not installed works too

from training_recorder import Recorder  # noqa: E402

import variable_batch_size as vbs  # noqa: E402
import xla_replica  # noqa: E402
from xla_replica import Replica  # noqa: E402

EPOCHS = {"mnist": 2, "digits": 30, "fake": 3}
LEARNING_RATES = {"sgd": 0.05, "adamw": 0.002}
# Columns of the log that the picture shows, and their labels.
PANELS = {
    "batch_size": "global batch size\n(samples)", "lr": "effective\nlearning rate",
    "gain": "gain (steps at\nthe reference)",
    "noise_scale": "gradient noise\nscale (samples)",
    "efficiency": "statistical\nefficiency", "loss": "training loss",
    "accuracy": "test accuracy\n(%)",
}  # fmt: skip


class ConvNet(nn.Sequential):
    """Three convolutions with BatchNorm, for 8-bit images of any side from 4 on."""

    def __init__(self, side: int) -> None:
        layers: list[nn.Module] = []
        channels = 1
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            layers += [
                nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            channels, side = width, -(-side // stride)
        super().__init__(*layers, nn.Flatten(), nn.Linear(channels * side**2, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.float() / 255 - 0.25)


def train(rank: int, args: argparse.Namespace) -> tuple[float, pd.DataFrame | None]:
    """Trains one replica.

    Returns:
        The test accuracy in per cent; and, on replica 0, the history of the run.
    """
    replica = xla_replica.current()  # elastic
    # Replicas may run in other processes, where torch_xla has set logging up.
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=replica.is_lazy)
    data = handwritten_digits.load(args.dataset, args.data_dir)
    with replica.seeded(args.seed):  # elastic: the same weights on every replica
        model = ConvNet(data.train_images.shape[-1])
    model.to(replica.device)
    sampler = vbs.CustomSampler(  # elastic
        dataset=data.train_images,
        trace=args.trace,
        minibatch_size=args.batch_size,
        seed=args.seed,
        on_end=args.on_end,
    )
    batches = DataLoader(
        TensorDataset(data.train_images, data.train_labels),
        batch_sampler=sampler,
        num_workers=args.num_workers,
        generator=torch.Generator(),  # so that it does not draw from the model's
    )
    optimizer = vbs.ElasticOptimizer(  # elastic
        inner_optimizer(args, model),
        sampler,
        args.rule,
        args.ref_batchsize,
        max_grad_norm=args.max_grad_norm,
        noise=args.measure_noise,
    )
    epochs = int(min(args.epochs, sampler.num_epochs))
    plans = [sampler.schedule.plan(e, sampler.num_replicas) for e in range(epochs)]
    is_open = args.iterations or args.closed_loop  # how long it takes is not known
    steps = None if is_open else sum(plan.num_steps for plan in plans)
    recorder = Recorder(replica, optimizer, args, steps)
    optimizer.attach(recorder)  # elastic: once per update, idle or not
    if args.closed_loop:
        least, most = args.closed_loop
        controller = vbs.BatchSizeController(  # elastic: decides its batch sizes itself
            optimizer, least=least, most=most, every=args.log_steps,
            trace_file=Path(args.logdir, "decided.csv"), log=recorder.log,
        )  # fmt: skip
        optimizer.attach(controller)
    checkpointer = None
    if args.checkpoint:
        checkpointer = vbs.Checkpointer(  # elastic: stops and resumes anywhere
            args.checkpoint, optimizer, every_updates=args.checkpoint_steps, best="max",
            settings=lasting(args), model=model, log=recorder.log,
        )  # fmt: skip
        checkpointer.load()
        optimizer.attach(checkpointer)
    percent = None
    with recorder.begin(checkpointer.num_updates if checkpointer else 0):
        for epoch in range(sampler.epoch, epochs):
            if args.iterations and optimizer.noise.progress >= args.iterations:
                break  # elastic: training length that no batch size changes
            sampler.set_epoch(epoch)  # elastic
            optimizer.set_epoch(epoch)  # elastic
            model.train()
            for images, labels in replica.loader(batches):
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                recorder.log.add(loss)
                optimizer.step()
            optimizer.average_buffers(model)  # elastic: before evaluation, checkpoints
            percent = evaluate(model, data, args.test_batch_size, replica)
            recorder.accuracy(epoch, percent)
            if checkpointer:
                checkpointer.save(metric=percent)
        if percent is None:  # a complete run was started again: no epoch was left
            percent = evaluate(model, data, args.test_batch_size, replica)
    history = vbs.read_run(recorder.log.path).updates if replica.is_primary else None
    return percent, history


def lasting(args: argparse.Namespace) -> dict[str, object]:
    """Returns the settings that a run must keep when it is resumed."""
    names = "dataset rule optimizer ref_batchsize lr momentum weight_decay"
    return {name: getattr(args, name) for name in [*names.split(), "max_grad_norm"]}


def inner_optimizer(
    args: argparse.Namespace, model: nn.Module
) -> torch.optim.Optimizer:
    options = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **options)
    return torch.optim.SGD(model.parameters(), momentum=args.momentum, **options)


def evaluate(
    model: nn.Module, data: handwritten_digits.Digits, batch_size: int, replica: Replica
) -> float:
    """Returns the test accuracy in per cent; replicas share the samples."""
    correct = torch.zeros(1, device=replica.device)
    model.eval()
    with torch.no_grad():
        batches = vbs.EvaluationSampler(data.test_labels, batch_size)  # elastic
        for rows in replica.loader(batches):
            guesses = model(data.test_images[rows].to(replica.device)).argmax(1)
            correct += (guesses == data.test_labels[rows].to(replica.device)).sum()
        replica.all_reduce_([correct])  # elastic
    return 100 * replica.fetch([correct])[0].item() / len(data.test_labels)


def limits(text: str) -> tuple[int, int]:
    """Returns the integers of a text such as ``64:512``, the smaller one first."""
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        told = "must be two batch sizes, the smaller one first, such as 64:512"
        raise argparse.ArgumentTypeError(f"{told}, got {text!r}")
    return int(least), int(most)


def listed(defaults: dict[str, float]) -> str:
    """Returns defaults by name as the help shows them."""
    return ", ".join(f"{value} for {name}" for name, value in defaults.items())


# Name, type or choices, default and help of every option with a value.
OPTIONS = (
    ("trace", str, str(HERE / "variable_trace.csv"),
     "CSV with columns step,batchsize, or one number for a constant batch size"),
    ("on-end", ("stop", "hold", "cycle"), None,
     "what follows the trace's last step (default: the trace begins again, or with "
     "--closed-loop its last batch size is held)"),
    ("closed-loop", limits, None,
     "LEAST:MOST: let the measured gradient noise scale decide the batch size after "
     "--trace, within these limits; decided.csv is a trace that repeats the run "
     "(default: off)"),
    ("rule", str, "linear",
     f"how the learning rate follows the batch size: {', '.join(vbs.RULES)}, or "
     "power:ALPHA (default: linear)"),
    ("optimizer", sorted(LEARNING_RATES), None,
     "default: adamw for the rules for Adam, sgd for the others"),
    ("iterations", float, None,
     "train whole epochs until the gains add up to this many steps at --ref-batchsize; "
     "implies --measure-noise (default: train --epochs)"),
    ("batch-size", int, 32,
     "samples in a minibatch, which one replica runs at once (default: 32)"),
    ("ref-batchsize", int, 128, "batch size at which --lr was tuned (default: 128)"),
    ("lr", float, None, f"reference learning rate (default: {listed(LEARNING_RATES)})"),
    ("momentum", float, 0.9, "momentum of SGD (default: 0.9)"),
    ("weight-decay", float, 1e-4, "default: 1e-4"),
    ("max-grad-norm", float, None,
     "clip the gradient to this global norm (default: do not clip)"),
    ("epochs", int, None, f"default: {listed(EPOCHS)}"),
    ("num-replicas", int, None,
     "default: all chips, GPUs or torchrun processes; 8 on a CPU"),
    ("num-workers", int, 0, "DataLoader workers (default: 0)"),
    ("test-batch-size", int, 64,
     "samples of a forward pass in evaluation (default: 64)"),
    ("seed", int, 42, "seed of weights and order (default: 42)"),
    ("log-steps", int, 10, "read the loss once every so many updates (default: 10)"),
    ("checkpoint", str, None,
     "save checkpoints in this folder, also on SIGTERM and Ctrl-C, and resume from the "
     "newest one, on any number of replicas"),
    ("checkpoint-steps", int, None,
     "save every so many updates (default: every 10 minutes)"),
    ("target-accuracy", float, None,
     "in per cent; exit with status 1 if the test accuracy is lower"),
    ("device", xla_replica.DEVICES, None,
     "default: a TPU, else GPUs, else XLA on this CPU, else gloo processes"),
    ("dataset", handwritten_digits.DATASETS, None,
     "default: MNIST if it can be loaded, else scikit-learn's digits"),
    ("data-dir", str, "data",
     "folder of MNIST, which is downloaded if missing (default: data)"),
    ("logdir", str, None,
     "folder of run.jsonl, history.csv, TensorBoard logs and the picture (default: the "
     "checkpoint's, or runs/mnist-TIME)"),
)  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, kind, default, text in OPTIONS:
        taken = {"type": kind} if callable(kind) else {"choices": kind}
        parser.add_argument(f"--{name}", default=default, help=text, **taken)
    told = "log gain, noise scale and efficiency under any rule (adascale always does)"
    parser.add_argument("--measure-noise", action="store_true", help=told)
    hides = {"dest": "progress", "action": "store_false"}
    parser.add_argument("--no-progress", help="do not show a progress bar", **hides)
    args = parser.parse_args(argv)
    positive = (
        "epochs num_replicas log_steps test_batch_size checkpoint_steps batch_size "
        "ref_batchsize"
    )
    for name in positive.split():
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.iterations is not None and not 0 < args.iterations < math.inf:
        parser.error(f"--iterations must be above 0, got {args.iterations}")
    if args.checkpoint_steps and not args.checkpoint:
        parser.error("--checkpoint-steps needs --checkpoint FOLDER, where to save")
    if args.closed_loop and args.on_end not in (None, "hold"):
        told = "--closed-loop decides what follows the trace: leave out --on-end, got"
        parser.error(f"{told} {args.on_end}")
    try:
        rule = vbs.rule_named(args.rule)
    except ValueError as error:
        parser.error(f"--rule: {error}")
    args.optimizer = args.optimizer or ("adamw" if rule.beta else "sgd")
    args.lr = LEARNING_RATES[args.optimizer] if args.lr is None else args.lr
    args.measure_noise |= args.iterations is not None or args.closed_loop is not None
    args.on_end = args.on_end or ("hold" if args.closed_loop else "cycle")
    if args.trace.isdecimal():
        args.trace = int(args.trace)
    now = time.strftime("%Y%m%d-%H%M%S")
    args.logdir = args.logdir or args.checkpoint or f"runs/mnist-{now}"
    return args


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse(argv)
    args.dataset = handwritten_digits.choose(args.dataset, args.data_dir)
    if args.epochs is None:
        args.epochs = 10_000 if args.iterations else EPOCHS[args.dataset]
    num_replicas = args.num_replicas or xla_replica.default_num_replicas(
        args.device, on_cpu=8
    )
    results = xla_replica.launch(train, (args,), num_replicas, args.device)
    accuracy, history = results[0]
    if history is not None:
        report(history, args)
    if args.target_accuracy is not None and accuracy < args.target_accuracy:
        print(f"test accuracy {accuracy:.2f} % misses {args.target_accuracy:g} %")
        return 1
    return 0


def report(history: pd.DataFrame, args: argparse.Namespace) -> None:
    """Writes history.csv and the picture, and prints where they are."""
    folder = Path(args.logdir)
    first = ["step", "batch_size", "lr", "loss", "accuracy"]
    rest = [column for column in history.columns if column not in first]
    history = history.reindex(columns=[*first, *rest])
    history.to_csv(folder / "history.csv", index=False)
    last = history["accuracy"].dropna()
    print(
        f"{len(history)} updates with {history['batch_size'].nunique()} distinct batch "
        f"sizes; test accuracy {last.iloc[-1] if len(last) else float('nan'):.2f} %"
    )
    try:
        run = {f"{args.dataset}, rule: {args.rule}": vbs.read_run(folder / "run.jsonl")}
        vbs.draw_runs(run, folder / "training.png", panels=PANELS)
        print(f"picture: {folder / 'training.png'}")
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed")
    print(f"TensorBoard: tensorboard --logdir {os.path.relpath(folder)}")


if __name__ == "__main__":
    sys.exit(main())
