"""Jobs that torchrun has started: restarts, several launches, exit statuses."""

import pytest
from support.scripts import python, written
from support.xla_replica.replicas import of_torch_alone
from support.xla_replica.torchrun import LAUNCHER, free_port

pytestmark = of_torch_alone

# In the first attempt both replicas exit in their second launch.
RESTARTED = """
import gc, os, sys, weakref, torch, xla_replica

groups = []

def train(rank, fails):
    replica = xla_replica.current()
    # Imports what would hold on to a group.
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    groups.append(weakref.ref(torch.distributed.group.WORLD))
    total = replica.scalar(rank + 1)
    replica.all_reduce_([total])
    if fails:
        sys.exit(21)
    return total.item()

if __name__ == "__main__":
    fails = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    totals = []
    for launch in range(3):
        totals += xla_replica.launch(train, (fails and launch == 1,), device="cpu")
    gc.collect()
    assert [group() for group in groups] == [None] * 3, groups
    os.write(1, f"TOTALS {totals}\\n".encode())
"""


@pytest.mark.parametrize("place", [
    pytest.param("--master_port ", id="static", marks=pytest.mark.slow),
    pytest.param("--rdzv_backend c10d --rdzv_endpoint localhost:", id="c10d"),
])  # fmt: skip
def test_every_launch_of_every_restart_meets_its_own_peers(tmp_path, place):
    """By keys of their own. Groups end with them: gloo threads may abort at exit."""
    torchrun = [each for each in LAUNCHER if each != "--standalone"]
    torchrun += ["--max_restarts", "1", *f"{place}{free_port()}".split()]
    done = python(written(tmp_path, RESTARTED), command=torchrun)
    assert done.stdout.count("TOTALS [3.0, 3.0, 3.0]") == 2
    assert "failed (exitcode: 21)" in done.stderr


# nccl's group waits for its peers when it is destroyed; gloo's does not.
RAISES = """
import os, time, torch, torch.distributed, xla_replica

torch.distributed.destroy_process_group = lambda: time.sleep(600)

def train(rank):
    replica = xla_replica.current()
    for step in range(5):
        if rank == 1 and step == 3:
            raise KeyError("the cause")
        replica.all_reduce_([torch.ones(1)])

if __name__ == "__main__":
    try:
        xla_replica.launch(train, device="cpu")
    finally:
        os.write(1, f"JOINED {torch.distributed.is_initialized()}\\n".encode())
"""


def test_an_exception_is_seen_although_peers_still_wait(tmp_path):
    done = python(written(tmp_path, RAISES), command=LAUNCHER, timeout=60, status=1)
    assert "KeyError: 'the cause'" in done.stderr
    assert "JOINED False" in done.stdout
