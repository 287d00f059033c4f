"""`Trace` reads every sensible source; an error says what is wrong with the others."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.traces.batch_trace import Trace, TraceError, TraceWarning


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


GOOD = {
    "plain": "step,batchsize\n0,64\n1,96\n",
    "leading spaces": " step,batchsize\n 0, 64\n 1, 96\n",
    "space before the header": "step, batchsize\n0,64\n1,96",
    "CRLF": "step,batchsize\r\n0,64\r\n1,96\r\n",
    "old Mac line ends": "step,batchsize\r0,64\r1,96\r",
    "byte order mark": b"\xef\xbb\xbfstep,batchsize\n0,64\n1,96\n",
    "blank lines": "\n\nstep,batchsize\n\n0,64\n  \n1,96\n\n",
    "extra and reordered columns": "note,batchsize,step\nx,64,0\ny,96,1\n",
    "quoted extra column": 'step,batchsize,note\n0,64,"a, b"\n1,96,"c"\n',
    "no step column": "batchsize\n64\n96\n",
    "floats": "step,batchsize\n0,64.0\n1,9.6e1\n",
    "spaces and zeros": "batchsize\n 064 \n96.0 \n",
    "quoted numbers": 'step,batchsize\n0,"64"\n1,"96"\n',
    "capitals": "Step,BatchSize\n0,64\n1,96\n",
    "steps from 1": "step,batchsize\n1,64\n2,96\n",
    "plus signs": "step,batchsize\n0,+64\n1,+96\n",
    "thresholds, in capitals": "Samples,BatchSize\n0,64\n64,96\n",
    "columns like others": "step,samples,tokens,batchsize\n0,7,,64\n1,7,x,96\n",
}


@pytest.mark.parametrize("content", GOOD.values(), ids=GOOD)
def test_good_files_are_read(tmp_path, content):
    path = write(tmp_path, content)
    with open(path, "rb") as binary, open(path, encoding="utf-8", newline="") as text:
        for source in (path, str(path), binary, text):
            assert Trace(source).batch_sizes.tolist() == [64, 96]


# The content, and a part of the message. Lines are physical and count from 1.
BAD = [
    ("step,batchsize\n0,64\n1,\n", "batchsize: '' must be an integer >= 1 and < 2**53"),
    ("step,batchsize\n0,64.5\n", "line 2, batchsize: '64.5' must be an integer"),
    ("step,batchsize\n0,nan\n", "line 2, batchsize: 'nan' must be an integer"),
    ("step,batchsize\n0,1_0\n", "line 2, batchsize: '1_0' must be an integer"),
    ("batchsize\n٣\n", "line 2, batchsize: '٣' must be an integer"),
    ("step,batchsize\n0,True\n", "line 2, batchsize: 'True' must be an integer"),
    ('step,batchsize\n0,"1,024"\n', "'1,024' must be an integer"),
    ("step,batchsize\n0,1,024\n", "line 2: 3 cells under 2 columns"),
    ("step,batchsize\n\n\n0,0\n", "line 4, batchsize: '0' must be an integer >= 1"),
    (f"batchsize\n{2**70}\n", f"'{2**70}' must be an integer >= 1 and < 2**53"),
    ("step,size\n0,64\n", "found none; the header is ['step', 'size']"),
    ("0,64\n1,96\n", "found none; the header is ['0', '64']"),
    ("batchsize,batchsize\n64,96\n", "found ['batchsize', 'batchsize']"),
    ("", "no steps; the file is empty"),
    (" \n\n", "no steps; the file is empty"),
    ("step,batchsize\n", "no rows; at least one is needed"),
    (b"\xff\xfe\x00", "not UTF-8 text"),
    # Lines are counted through quoted cells.
    ('batchsize,note\n64,"two\nlines"\n-1,x\n', "line 4, batchsize: '-1' must"),
    ('batchsize,note\n64,"two\nlines"\n1,x,\n', "line 4: 3 cells under 2 col"),
    ('\nbatchsize\n64\n"96\n', "not CSV text (unexpected end of data)"),
    ("samples,batchsize\n5,64\n", "line 2, samples: '5' must be 0, as"),
    ("samples,batchsize\n0,64\n9,64\n9,32\n", "line 4, samples: '9' must be larger"),
    ("samples,batchsize\n0,64\n-9,32\n", "'-9' must be an integer >= 0 and < 2**53"),
    ("batchsize,tokens\n64,0\n\n64,0.5\n", "line 4, tokens: '0.5' must be an integer"),
    (f"tokens,batchsize\n0,6\n{2**63},9\n", "line 3, tokens"),
    ("samples,tokens,batchsize\n0,0,64\n", "one column samples or tokens, found"),
    ("step,samples,batchsize\n0,0,64\n1,9,96\n", "leave out 'step' if rows hold fr"),
    ("step,tokens,batchsize\n0,0,64\n1,64,96\n", "many tokens on, else 'tokens'"),
    ("tokens,batchsize\n0,64\n", "the column tokens needs tokens_per_sample"),
    (f"samples,batchsize\n0,1\n{2**40},2\n", "7 steps lead to the last row"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_files_say_where_and_why(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(TraceError) as caught:
        Trace(path, tokens_per_sample=None if "per_sample" in message else 8)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


WARNED = {
    "step,batchsize\n5,64\n2,64\n": "line 2, step: 5 should be 0",
    "step,batchsize\n0,64\n2,64\n": "line 3, step: 2 should be 1",
    "step,batchsize\n0,64\nx,64\n": "line 3, step: x should be 1",
    # As one that was cut out of a longer one: its rows are those of step 0 and on.
    "step,batchsize\n1000,64\n": "line 2, step: 1000 should be 0. Rows are used in",
    "samples,batchsize\n0,64\n10,32\n20,64\n": "line 3, batchsize: 32 is not used",
}


@pytest.mark.parametrize("content", WARNED)
def test_what_is_probably_not_meant_warns(tmp_path, content):
    with pytest.warns(TraceWarning, match=WARNED[content]):
        trace = Trace(write(tmp_path, content))
    assert set(trace.batch_sizes.tolist()) == {64}


IN_MEMORY = [
    [64, 96], (64, 96), range(64, 97, 32), [np.int64(64), 96.0],
    np.array([64, 96]), np.array([64, 96], np.uint16), np.array([64.0, 96.0]),
    torch.tensor([64, 96]),
    torch.tensor([64, 96], dtype=torch.bfloat16, requires_grad=True),
    pd.Series([64, 96]), pd.DataFrame({"batchsize": [64.0, 96.0]}),
    pd.DataFrame({"step": [0, 1], " batchsize ": [64, 96], "x": ["a", "b"]}),
    io.StringIO("batchsize\n64\n96\n"), Trace([64, 96]),
]  # fmt: skip


@pytest.mark.parametrize("source", IN_MEMORY, ids=lambda source: type(source).__name__)
def test_sources_in_memory(source):
    trace = Trace(source)
    assert trace.batch_sizes.tolist() == [64, 96]
    assert trace.batch_sizes.dtype == np.int64
    assert (trace.endless, len(trace)) == (False, 2)


@pytest.mark.parametrize(("source", "error", "message"), [
    (True, TypeError, "trace=True of type bool"),
    (6.4, TypeError, "of type float"),
    (0, ValueError, "0 must be an integer >= 1"),
    ("nofile.csv", FileNotFoundError, "nofile.csv"),
    ([], TraceError, "the list: no rows"),
    ([64, 0], TraceError, "the list, element 1, batchsize: 0 must be an int"),
    ([64, True], TraceError, "element 1, batchsize: True must be an integer"),
    (["64"], TraceError, "element 0, batchsize: '64' must be an integer"),
    ((64, 0.5), TraceError, "the tuple, element 1, batchsize: 0.5 must be an"),
    (np.array([64.5]), TraceError, "element 0, batchsize: 64.5 must be an integer"),
    (torch.tensor([64, 0]), TraceError, "the Tensor, element 1, batchsize: 0 must"),
    (torch.ones(2, 2), TraceError, "element 0, batchsize: array([1.0, 1.0]"),
    (torch.tensor(64), TypeError, "trace=tensor(64) of type Tensor: allowed are"),
    (pd.DataFrame({"size": [64]}), TraceError, "the header is ['size']"),
    (pd.DataFrame({"batchsize": [64, None]}), TraceError, "element 1, batchsize"),
], ids=repr)  # fmt: skip
def test_bad_sources_in_memory(source, error, message):
    with pytest.raises(error) as caught:
        Trace(source)
    assert message in str(caught.value)


def test_errors_of_the_schedule_name_the_physical_line_or_the_element(tmp_path):
    path = write(tmp_path, "step,batchsize\n\n0,64\n\n1,40\n2,512\n")
    table = pd.DataFrame({"samples": [0, 100, 300], "batchsize": [32, 40, 64]})
    uneven = "batch size 40 is not a multiple of minibatch_size=32: .*pad_minibatch"
    for source, minibatch_size, message in (
        (path, 32, f"trace.csv, line 5: {uneven}"),
        (path, 8, "line 6: batch size 512 exceeds epoch capacity: 256 samples hold 32"),
        (table, 32, f"DataFrame, element 1: {uneven}"),
    ):
        with pytest.raises(TraceError, match=message):
            Schedule(Trace(source), 256, minibatch_size)


def test_thresholds_and_their_steps_are_the_same_run():
    def sampler(trace: Trace, on_end: str = "stop") -> CustomSampler:
        options = {"num_replicas": 2, "rank": 0, "minibatch_size": 4}
        return CustomSampler(range(50), trace, on_end=on_end, **options)

    rows = {"samples": [0, 30, 70], "batchsize": [8, 4, 12]}
    trace = Trace(pd.DataFrame(rows))
    steps = [8] * 4 + [4] * 10 + [12]
    assert trace.batch_sizes.tolist() == steps
    found, expected = sampler(trace), sampler(Trace(steps), "hold")
    state = found.state_dict() | {"epoch": 1, "step": 2}
    expected.load_state_dict(state)  # so it may be resumed
    assert expected.cursor == (1, 2)
    for other in (sampler(Trace(steps)), sampler(Trace([*steps, 12]), "hold")):
        with pytest.raises(ValueError, match="is of another run"):
            other.load_state_dict(state)
