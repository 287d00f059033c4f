"""`run` keeps members running: who dies at once ends nobody else."""

import signal

import pytest

from xla_replica.members.supervisor import keep_running

SCRIPT = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1], "first").mkdir()
except FileExistsError:
    sys.exit(3)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(("seconds", "status"), [(2.5, 0), (0, 3)])
def test_a_member_that_dies_again_and_again_ends_no_other_one(
    seconds, status, tmp_path, caplog
):
    before = signal.getsignal(signal.SIGTERM)
    script = ["-c", SCRIPT, str(tmp_path), str(seconds), str(status)]
    try:
        assert keep_running(script, 2, {}) == status
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "another one in 1 s" in caplog.text
    assert ("those before it have failed" in caplog.text) == (status == 3)
