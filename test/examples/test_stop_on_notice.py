"""A training is asked to stop as Google's metadata server announces it."""

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator

import pytest
from support.documents import ROOT

SCRIPT = ROOT / "examples/launch/stop_on_notice.py"
# Ends as one that a Checkpointer has stopped.
TRAINS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("trains", flush=True)
time.sleep(60)
"""


class Metadata(http.server.ThreadingHTTPServer):
    """What a Compute Engine machine asks about itself, as its documentation says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.entries = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.changed = threading.Condition()
        self.asked: list[str] = []
        self.is_down = False


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        folder, _, name = url.path.rpartition("/")
        server = self.server
        server.asked.append(name)
        if self.headers["Metadata-Flavor"] != "Google":
            return self.send_error(403)
        if server.is_down or folder != "/computeMetadata/v1/instance":
            return self.send_error(503)
        with server.changed:
            if query.get("wait_for_change") == ["true"]:
                # An entry's version is its value here.
                server.changed.wait_for(
                    lambda: query["last_etag"] != [server.entries[name]],
                    float(query["timeout_sec"][0]),
                )
            value = server.entries[name]
        self.send_response(200)
        self.send_header("ETag", value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # who asked has ended
            self.wfile.write(value.encode())

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def begin(metadata: Metadata, command: str = TRAINS) -> subprocess.Popen[str]:
    own = {"GCE_METADATA_HOST": f"127.0.0.1:{metadata.server_port}"}
    own["http_proxy"] = "http://127.0.0.1:9"  # which metadata never pass
    process = subprocess.Popen(
        [sys.executable, SCRIPT, sys.executable, "-c", command], text=True,
        env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if command is TRAINS:
        assert process.stdout.readline() == "trains\n"
        while set(metadata.asked) < set(metadata.entries):
            assert process.poll() is None
            time.sleep(0.01)
    return process


@pytest.mark.parametrize(("name", "value", "is_down"), [
    ("preempted", "TRUE", False),
    ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", False),
    ("preempted", "TRUE", True),
])  # fmt: skip
def test_a_notice_stops_the_training_and_no_answer_is_told_once(
    metadata, name, value, is_down
):
    metadata.is_down = is_down
    with begin(metadata) as process:
        while is_down and metadata.asked.count(name) < 2:
            time.sleep(0.01)
        metadata.is_down = False
        with metadata.changed:
            metadata.entries[name] = value
            metadata.changed.notify_all()
        _, error = process.communicate(timeout=30)
    assert process.returncode == 143
    assert error.endswith(f"{name} is {value}: asking to stop\n")
    assert error.count(f"{name}: HTTP Error 503") == is_down
    assert metadata.asked.count(name) <= 3  # the server was waited for, not polled


@pytest.mark.parametrize(("number", "status"), [
    (signal.SIGTERM, 143), (signal.SIGINT, 130), (None, 7),
])  # fmt: skip
def test_signals_are_passed_on_and_the_exit_status_is_the_command_s(
    metadata, number, status
):
    """The command catches SIGTERM alone."""
    with begin(metadata, TRAINS if number else "raise SystemExit(7)") as process:
        if number:
            process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == status
