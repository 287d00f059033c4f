"""pandas, which is imported when something of it is first used.

It takes half as long as torch to import, and most trainings have no table.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["is_pandas", "pd"]

if TYPE_CHECKING:
    import pandas as pd
else:

    class _Pandas:
        def __getattr__(self, name: str) -> Any:
            import pandas

            return getattr(pandas, name)

    pd = _Pandas()


def is_pandas(value: object, kind: str) -> bool:
    """Returns whether a value is of this class of pandas, without importing it."""
    return "pandas" in sys.modules and isinstance(value, getattr(pd, kind))
