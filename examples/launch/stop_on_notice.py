"""Runs a training, and asks it to stop when Google Cloud takes its machine away.

    python examples/launch/stop_on_notice.py python train.py --checkpoint /shared/job

On a TPU VM, or any other of Compute Engine, on every host. The metadata server says
that a spot machine is preempted, or that maintenance begins, which no TPU survives; the
command is then sent SIGTERM, after which a `Checkpointer` saves. So is a SIGTERM or
SIGINT that this script receives, and the command's exit status is the script's.
GCE_METADATA_HOST is the server's address, as for Google's own libraries.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

# What the metadata server says of an instance as long as nothing happens to it.
QUIET = {"preempted": "FALSE", "maintenance-event": "NONE"}
PAUSE_SECONDS = 1.0


def wait_for_notice(name: str) -> str:
    """Returns what an entry of the instance's metadata says instead of "quiet"."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/{name}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    version, failed = "NONE", False
    while True:
        # The server answers when the entry is of another version, or after a minute.
        query = f"?wait_for_change=true&timeout_sec=60&last_etag={version}"
        request = urllib.request.Request(
            url + query, headers={"Metadata-Flavor": "Google"}
        )
        try:
            with direct.open(request, timeout=90) as answer:
                value = answer.read().decode().strip()
                version, failed = answer.headers.get("ETag", "NONE"), False
        except OSError as error:
            if not failed:
                print(f"{url}: {error}; asking again", file=sys.stderr, flush=True)
            value, failed = QUIET[name], True
        if value != QUIET[name]:
            return value
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="what to run, with its arguments"
    )
    command = parser.parse_args().command
    if not command:
        parser.error("no command is given")
    training = subprocess.Popen(command)

    def watch(name: str) -> None:
        value = wait_for_notice(name)
        print(f"{name} is {value}: asking to stop", file=sys.stderr, flush=True)
        training.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: training.send_signal(number))
    for name in QUIET:
        threading.Thread(target=watch, args=(name,), daemon=True).start()
    status = training.wait()
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
