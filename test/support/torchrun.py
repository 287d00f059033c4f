"""Running a script under torchrun."""

from __future__ import annotations

import sys

LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", "2")  # fmt: skip
