"""The scores of a pool, and their ways out."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pandas as pd


@dataclasses.dataclass(frozen=True)
class PoolScores:
    """One score per sample of a pool.

    Attributes:
        scores: ``(n,)`` float32; ``scores[i]`` is that of ``dataset[i]``.
        name: Of the score.
    """

    scores: np.ndarray
    name: str

    def __len__(self) -> int:
        return len(self.scores)

    def top(self, k: int) -> np.ndarray:
        """Indices of the k highest scores, highest first; ties by lower index.

        Raises:
            ValueError: There are not k samples, or a score is NaN.
        """
        if not 0 <= k <= len(self):
            raise ValueError(f"top({k}) of {len(self)} samples")
        bad = np.flatnonzero(np.isnan(self.scores))
        if len(bad):
            raise ValueError(
                f"{len(bad)} scores are NaN, the first that of sample {bad[0]}: the "
                "model's output or loss is not finite there; leave these samples out "
                "of the pool"
            )
        return np.argsort(-self.scores, kind="stable")[:k]

    def to_frame(self) -> pd.DataFrame:
        """Columns ``index`` and ``score``."""
        return pd.DataFrame({"index": np.arange(len(self)), "score": self.scores})

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_frame` as CSV."""
        self.to_frame().to_csv(path, index=False)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_frame` as Parquet.

        Raises:
            ImportError: Neither pyarrow nor fastparquet is installed.
        """
        try:
            self.to_frame().to_parquet(path, index=False)
        except ImportError as error:
            raise ImportError(
                "to_parquet: pandas writes Parquet with pyarrow or fastparquet, and "
                "neither can be imported; pip install pyarrow, or use to_csv"
            ) from error
