"""The packages import where the names of POSIX are missing, as on Windows."""

from support.scripts import python
from support.xla_replica.replicas import of_torch_alone

IMPORTS = """
import os, signal, sys
import torch  # has a build for Windows

for name in ("SIGHUP", "SIGKILL", "SIGSTOP", "pthread_sigmask"):
    delattr(signal, name)
for name in ("fork", "register_at_fork", "setpgid"):
    delattr(os, name)
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
import grab_xla, per_sample_grad, rigl_xla, variable_batch_size as vbs, xla_replica
import variable_batch_size.command_line

def train(rank):
    return xla_replica.current().num_replicas

assert xla_replica.launch(train, num_replicas=1, device="cpu") == [1]
try:
    xla_replica.launch(train, num_replicas=2, device="cpu")
except NotImplementedError as error:
    print(error)
"""


@of_torch_alone
def test_where_there_are_no_posix_signals_one_replica_runs():
    done = python("-c", IMPORTS)
    assert "on Windows train with num_replicas=1" in done.stdout
