"""Text as bytes: a file, a public corpus, or the text of this repository."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from examples.ordering.ordered_training import Splits

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]
# The arguments of datasets.load_dataset.
CORPORA = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "openwebtext": ("Skylion007/openwebtext",),
}
TEST_SHARE = 0.1


def choose(
    text: str | None, dataset: str | None, folder: str, max_bytes: int
) -> tuple[str, ...]:
    """Returns the files to train on: ``text``, the corpus, or this repository's text.

    A warning says if the corpus is not available.

    Raises:
        OSError: ``text`` cannot be read.
    """
    if text is not None:
        with open(text, "rb"):
            return (text,)
    if dataset is not None:
        try:
            return (str(_downloaded(dataset, Path(folder), max_bytes)),)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            logger.warning(
                "%s is not available (%s); using the text of this repository",
                dataset,
                reason,
            )
    patterns = ("*.md", "docs/*.md", "*/*.py", "*/*/*.py")
    found = (path for pattern in patterns for path in REPOSITORY.glob(pattern))
    inside = (path.relative_to(REPOSITORY) for path in found)
    # Virtual environments are in folders that begin with a dot.
    kept = sorted(path for path in inside if not path.parts[0].startswith("."))
    return tuple(str(REPOSITORY / path) for path in kept)


def _downloaded(name: str, folder: Path, max_bytes: int) -> Path:
    """Writes the corpus's first ``max_bytes`` bytes to a text file, once."""
    path = folder / f"{name}-{max_bytes}.txt"
    if path.exists():
        return path
    import datasets

    corpus = datasets.load_dataset(*CORPORA[name], split="train", streaming=True)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        for document in corpus:
            file.write(document["text"].encode())
            if file.tell() >= max_bytes:
                break
    return unfinished.replace(path)


def load(files: tuple[str, ...], context: int, max_bytes: int) -> Splits:
    """Returns windows of ``context`` bytes; targets are one byte later.

    Windows of one half do not overlap; the last tenth of the text is for testing.

    Raises:
        ValueError: The text is too short.
    """
    read = b"".join(Path(file).read_bytes() for file in files)[:max_bytes]
    num_test = int(TEST_SHARE * len(read))
    if num_test <= context:
        raise ValueError(
            f"the text has {len(read)} bytes, but windows of {context} need more than "
            f"{round((context + 1) / TEST_SHARE)}: use more text or a smaller context"
        )
    text = torch.frombuffer(bytearray(read), dtype=torch.uint8)
    return Splits(
        _windows(text[: len(text) - num_test], context),
        _windows(text[len(text) - num_test :], context),
    )


def _windows(text: torch.Tensor, context: int) -> TensorDataset:
    """Returns windows that are views and take no memory."""
    windows = text.unfold(0, context + 1, context)
    return TensorDataset(windows[:, :-1], windows[:, 1:])
