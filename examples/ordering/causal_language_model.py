"""Trains a small GPT on bytes, its windows in several orders, and compares them.

    python examples/ordering/causal_language_model.py  # this repository
    python examples/ordering/causal_language_model.py --text book.txt \\
        --order rr,mean --seeds 3
    python examples/ordering/causal_language_model.py --dataset wikitext-103 \\
        --order rr,pair --random-projection kron --normalize-grads
    python examples/ordering/causal_language_model.py --model gpt-neox --bf16
    python examples/ordering/causal_language_model.py --fidelity projected \\
        --trace trace.csv --minibatch-size 8
    python examples/ordering/causal_language_model.py --num-replicas 2 --device xla
    torchrun --rdzv_backend c10d --nproc_per_node 2 \\
        examples/ordering/causal_language_model.py
    python examples/ordering/causal_language_model.py --checkpoint saved --resume

A sample is a window of the text; its gradient is that of the mean loss of its bytes.
'rr' is random reshuffling. 'mean', 'pair', 'recursive' and 'recursive-pair' order every
epoch by the per-sample gradients of the previous one, so training for a single epoch
does not gain from them. Memory: one gradient of the whole model per window of a batch;
little with --fidelity projected or group.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # An uninstalled checkout works, too.

from examples.ordering import hugging_face_model, text_data  # noqa: E402
from examples.ordering.language_model import ByteGPT  # noqa: E402
from examples.ordering.ordered_training import Splits, train_and_report  # noqa: E402
from examples.ordering.training_options import add_shared, finish  # noqa: E402

MODELS: dict[str, Callable[[int, int, int, int, bool], nn.Module]] = {
    "gpt": ByteGPT,
    "gpt-neox": hugging_face_model.GPTNeoX,
}


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A language model of bytes.

    Attributes:
        name: What the text is called in reports.
        files: The files of the text.
        model: A key of `MODELS`.
        context, width, num_layers, num_heads, tied: See `ByteGPT`.
        max_bytes: How many bytes of the text are used.
    """

    name: str
    files: tuple[str, ...]
    model: str
    context: int
    width: int
    num_layers: int
    num_heads: int
    tied: bool
    max_bytes: int

    @property
    def title(self) -> str:
        return f"{self.model} of {self.num_layers} layers on {self.name}"

    def load(self) -> Splits:
        return text_data.load(self.files, self.context, self.max_bytes)

    def build_model(self) -> nn.Module:
        return MODELS[self.model](
            self.context, self.width, self.num_layers, self.num_heads, self.tied
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="train on this file")
    source.add_argument(
        "--dataset",
        choices=sorted(text_data.CORPORA),
        help="train on a corpus of the package 'datasets' (default, and if it is not "
        "available: the text of this repository)",
    )
    add = parser.add_argument
    add("--data-dir", default="data", help="folder of corpora (default: data)")
    add(
        "--max-bytes",
        type=int,
        default=20_000_000,
        help="bytes of the text that are used (default: 20000000)",
    )
    add(
        "--model",
        choices=MODELS,
        default="gpt",
        help="gpt is written out in examples/ordering/language_model.py; gpt-neox is "
        "that of Hugging Face's transformers, with random weights (default: gpt)",
    )
    add("--context", type=int, default=128, help="bytes in a window (default: 128)")
    add(
        "--width",
        type=int,
        default=128,
        help="width of the hidden state (default: 128)",
    )
    add("--num-layers", type=int, default=4, help="blocks (default: 4)")
    add("--num-heads", type=int, default=4, help="attention heads (default: 4)")
    add("--untied", action="store_true", help="use a separate matrix for the logits")
    add_shared(
        parser, epochs=10, batch_size=32, optimizer="adamw", lr=1e-3, momentum=0.9,
        weight_decay=0.01,
    )  # fmt: skip
    args = parser.parse_args(argv)
    finish(parser, args, "text")
    for name in ("max_bytes", "context", "width", "num_layers", "num_heads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.model == "gpt-neox" and not hugging_face_model.is_installed():
        parser.error(
            "--model gpt-neox needs the package transformers, which is not installed: "
            "pip install transformers"
        )
    if args.width % args.num_heads:
        parser.error(
            f"--width {args.width} is not a multiple of --num-heads {args.num_heads}"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse(argv)
    try:
        files = text_data.choose(args.text, args.dataset, args.data_dir, args.max_bytes)
        text_data.load(files, args.context, args.max_bytes)
    except (OSError, ValueError) as error:
        print(f"causal_language_model.py: error: {error}", file=sys.stderr)
        return 2
    name = Path(files[0]).stem if len(files) == 1 else "this repository"
    task = TextTask(
        name, files, args.model, args.context, args.width, args.num_layers,
        args.num_heads, not args.untied, args.max_bytes,
    )  # fmt: skip
    return train_and_report(task, args)


if __name__ == "__main__":
    sys.exit(main())
