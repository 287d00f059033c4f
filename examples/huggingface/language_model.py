"""Trains a tiny GPT-2 with Hugging Face's Trainer and a changing batch size.

    python examples/huggingface/language_model.py
    torchrun --nproc_per_node 3 examples/huggingface/language_model.py  # the same run
    python examples/huggingface/language_model.py --num-replicas 2

Run again, on any number of processes, it continues where it was killed. The text is
that of this repository, in bytes; paragraphs have different lengths, so the step's
gradient is the mean over its bytes. Needs the extra `transformers`.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a bare checkout

import xla_replica  # noqa: E402
from examples.common.replica_options import (  # noqa: E402
    add_replicas,
    check_at_least_one,
)

END = 0  # ends a text and fills up a minibatch


class Paragraphs(Dataset):
    """The paragraphs of the documentation, as bytes: a token is a byte."""

    def __init__(self, context: int, part: slice) -> None:
        files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
        kept = [p.encode()[: context - 1] for p in text.split("\n\n") if len(p) > 20]
        self.texts = kept[part]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        return [*self.texts[index], END]


def collate(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Returns a minibatch; the padding of shorter texts is not predicted."""
    length = max(map(len, texts))
    tokens = torch.tensor([t + [END] * (length - len(t)) for t in texts])
    lengths = torch.tensor([len(t) for t in texts])[:, None]
    is_text = torch.arange(length) < lengths
    return {
        "input_ids": tokens,
        "attention_mask": is_text.long(),
        "labels": tokens.where(is_text, -100),
    }


def trace(num_steps: int, least: int, most: int) -> list[int]:
    """Returns a batch size that doubles, as machines join, and falls when they go."""
    sizes = [least]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    wave = sizes + sizes[-2:0:-1] if len(sizes) > 1 else sizes
    return [wave[step // 5 % len(wave)] for step in range(num_steps)]


def train(rank: int, args: argparse.Namespace) -> list[dict[str, float]] | None:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from variable_batch_size.integrations.hugging_face import ElasticTrainer

    replica = xla_replica.current()
    with replica.seeded(0):  # the same weights in every process
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256, n_positions=args.context, n_embd=args.width,
                n_layer=2, n_head=2, bos_token_id=END, eos_token_id=END,
                loss_type="ForCausalLM",
            )
        )  # fmt: skip
    trainer = ElasticTrainer(
        model,
        TrainingArguments(
            args.folder,
            use_cpu=replica.is_host,
            per_device_train_batch_size=args.minibatch_size,
            max_steps=args.steps,
            learning_rate=args.lr,
            warmup_steps=args.steps // 10,
            logging_steps=max(args.steps // 20, 1),
            save_steps=args.save_steps,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=max(args.steps // 4, 1),
            disable_tqdm=not args.progress,
            report_to=[],
        ),
        collate,
        Paragraphs(args.context, slice(0, -50)),
        Paragraphs(args.context, slice(-50, None)),
        trace=trace(args.steps, args.minibatch_size, args.most),
        rule="root",
        ref_batchsize=args.minibatch_size,
    )
    trainer.train(resume_from_checkpoint=trainer.last_checkpoint())
    return trainer.state.log_history if replica.is_primary else None


def show(history: list[dict[str, float]]) -> None:
    """Prints the run: the loss is in nats a byte."""
    print(f"{'step':>6} {'batch':>6} {'learning rate':>14} {'loss':>7} {'test':>7}")
    tests = {log["step"]: log["eval_loss"] for log in history if "eval_loss" in log}
    for log in history:
        if "loss" in log:
            test = f"{tests[log['step']]:7.3f}" if log["step"] in tests else ""
            print(
                f"{log['step']:6} {log['batch_size']:6} "
                f"{log['effective_learning_rate']:14.2e} {log['loss']:7.3f} {test}"
            )


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        default="runs/huggingface",
        help="of checkpoints, from which a run is resumed (default: runs/huggingface)",
    )
    parser.add_argument("--steps", type=int, default=200, help="updates (default: 200)")
    parser.add_argument(
        "--minibatch-size", type=int, default=8, help="in texts (default: 8)"
    )
    parser.add_argument(
        "--most", type=int, default=64, help="the largest batch size (default: 64)"
    )
    parser.add_argument(
        "--context", type=int, default=128, help="most bytes of a text (default: 128)"
    )
    parser.add_argument(
        "--width", type=int, default=64, help="of the model (default: 64)"
    )
    parser.add_argument(
        "--lr", type=float, default=2e-3, help="of one minibatch (default: 0.002)"
    )
    parser.add_argument(
        "--save-steps", type=int, default=20, help="updates between saves (default: 20)"
    )
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_false",
        help="show no progress bar",
    )
    add_replicas(parser)
    args = parser.parse_args(words)
    check_at_least_one(
        parser,
        args,
        (
            "steps",
            "minibatch_size",
            "width",
            "save_steps",
            "num_replicas",
            "most",
            "context",
        ),
    )
    results = xla_replica.launch(train, (args,), args.num_replicas, args.device)
    if results[0]:
        show(results[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
