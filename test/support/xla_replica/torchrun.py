"""Running a script under torchrun."""

import socket
import sys
import time

LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", "2")  # fmt: skip


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def wait_for_server(port: int, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while True:
        with socket.socket() as client:
            if client.connect_ex(("localhost", port)) == 0:
                return
        assert time.monotonic() < deadline, f"nobody listens on port {port}"
        time.sleep(0.1)
