"""Runs a script that calls torch_xla.launch or xmp.spawn, without a change, on N XLA
replicas of this CPU with real collectives, as a TPU with N cores would.

examples:
  python -m xla_replica --num-replicas 8 train.py --lr 0.1
  python -m xla_replica --num-replicas 4 -m my_package.train --epochs 2

train.py:
  import torch_xla

  def train(index, lr):
      ...  # as for a TPU: torch_xla.device(), xm.optimizer_step(optimizer), ...

  if __name__ == "__main__":
      torch_xla.launch(train, args=(0.1,))

Options of this command come before the script, whose arguments follow it. The exit
status is the script's. docs/xla_replica.md says what differs from a TPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from xla_replica.common.arguments import check_integer, check_number
from xla_replica.starting.scripts import run_script
from xla_replica.starting.xla import EmulatedRuntime


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a ``SystemExit`` that the script raises passes through."""
    parser = argparse.ArgumentParser(
        prog="python -m xla_replica", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--num-replicas", type=int, required=True, metavar="N", help="at least 1")
    add("--timeout", type=float, default=300.0, metavar="SECONDS",
        help="how late a replica may be at a collective (default: %(default)g)"
    )  # fmt: skip
    add("--as-tpu", action="store_true",
        help="let xm.xla_device_hw() say TPU, for scripts that ask it what to do"
    )  # fmt: skip
    add("-m", dest="is_module", action="store_true",
        help="the script is the name of a module, as for python -m"
    )  # fmt: skip
    add("script", help="a file, or a module after -m")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    args = parser.parse_args(arguments)
    try:
        check_integer("--num-replicas", args.num_replicas, least=1)
        check_number("--timeout", args.timeout, above=0)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    runtime = EmulatedRuntime(args.num_replicas, args.timeout, args.as_tpu)
    if not run_script(args.script, args.arguments, args.is_module, runtime):
        sys.stderr.write(
            f"xla_replica: {args.script} has not called torch_xla.launch or xmp.spawn "
            f"(or with nprocs=1), so it did not run on {args.num_replicas} replicas\n"
        )


if __name__ == "__main__":
    main()
