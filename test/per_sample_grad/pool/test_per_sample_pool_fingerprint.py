"""Kept scores are those of the same code, constants, attributes and tensors."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import operator
import os
import re
import subprocess
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.pool import CLASSES, COUNT, Pool, make_model
from torch import nn
from torch.utils.data import DataLoader, default_collate

import per_sample_grad as psg
from per_sample_grad.pool.fingerprint import fingerprint


def scores(**job: Any) -> np.ndarray:
    job = {"model": make_model(), "loader": Pool(), "progress": False, **job}
    return psg.score_pool(**job).scores


def with_activation(activation: Any) -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Flatten(), nn.Linear(12, 5), activation, nn.Linear(5, CLASSES)]
    return nn.Sequential(*body)


class Activated(nn.Module):
    """A module whose activation is a function, and another one is hidden in a list."""

    def __init__(self, activation: Any, hidden: Any = torch.tanh) -> None:
        super().__init__()
        self.activation, self._hidden = activation, [hidden]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._hidden[0](self.activation(x))


def powered(logits, targets, power=1):
    return F.cross_entropy(logits, targets, reduction="none") ** power


class Weighted:
    """A loss that is an object, or one of its methods."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, logits, targets):
        return self.factor * powered(logits, targets)

    def loss(self, logits, targets):
        return self(logits, targets)


def closure(factor: float):
    def loss(logits, targets):
        return factor * powered(logits, targets)

    return loss


def with_global(factor: float):
    """Returns a loss of a module of its own, where the factor is a global."""
    module = types.ModuleType("losses_of_mine")
    text = f"import torch.nn.functional as F\nFACTOR = {factor}\n"
    text += "def scaled(x):\n    return FACTOR * x\n"
    text += "def loss(logits, targets):\n"
    text += "    return scaled(F.cross_entropy(logits, targets, reduction='none'))\n"
    exec(text, module.__dict__)
    return module


def through_module(factor: float):
    losses = with_global(factor)
    return lambda logits, targets: losses.loss(logits, targets)


def importing(factor: float):
    def loss(logits, targets):
        from losses_of_mine import loss

        return loss(logits, targets)

    sys.modules["losses_of_mine"] = with_global(factor)
    return loss


def hooked(factor: float) -> nn.Module:
    model = make_model()
    model[2].register_forward_hook(lambda module, inputs, out: factor * out)
    return model


def other_class(factor: float) -> nn.Module:
    class Scaled(nn.Module):
        if factor == 1:

            def forward(self, x):
                return 1.0 * x
        else:

            def forward(self, x):
                return 2.0 * x

    return with_activation(Scaled())


def smoothed(value: float) -> dict[str, Any]:
    return {"loss": nn.CrossEntropyLoss(label_smoothing=value, reduction="none")}


def class_weighted(value: float) -> dict[str, Any]:
    weight = torch.full((CLASSES,), value)
    return {"loss": nn.CrossEntropyLoss(weight=weight, reduction="none")}


def through_partial(value: float) -> dict[str, Any]:
    options = {"label_smoothing": value, "reduction": "none"}
    return {"loss": functools.partial(F.cross_entropy, **options)}


def lambdas(value: float) -> dict[str, Any]:
    if value == 1:
        return {"loss": lambda logits, y: powered(logits, y)}
    return {"loss": lambda logits, y: powered(logits, y) * 2}


def collate_scaled(factor: float, samples):
    return default_collate([(factor * x, y) for x, y in samples])


# From a number to arguments, and what differs between the numbers 1 and 0.5.
JOBS: dict[str, tuple[Any, str]] = {
    "lambda": (lambdas, "loss"),
    "partial": (through_partial, "loss.keywords['label_smoothing']"),
    "module": (smoothed, "loss.label_smoothing"),
    "tensor": (class_weighted, "loss.weight"),
    "closure": (lambda v: {"loss": closure(v)}, "loss.factor"),
    "default": (
        lambda v: {"loss": lambda x, y, power=v: powered(x, y, power)},
        "loss.__defaults__[0]",
    ),
    "object": (lambda v: {"loss": Weighted(v)}, "loss.factor"),
    "method": (lambda v: {"loss": Weighted(v).loss}, "loss.__self__.factor"),
    "global": (lambda v: {"loss": with_global(v).loss}, "loss.scaled.FACTOR"),
    "global-of-a-module": (
        lambda v: {"loss": through_module(v)},
        "loss.losses.loss.scaled.FACTOR",
    ),
    "imported": (
        lambda v: {"loss": importing(v)},
        "loss.losses_of_mine.loss.scaled.FACTOR",
    ),
    "forward": (
        lambda v: {"forward": lambda model, x: model(v * x)},
        "forward.v",
    ),
    "split": (lambda v: {"split": lambda batch: (v * batch[0], batch[1])}, "split.v"),
    "collate": (
        lambda v: {
            "loader": DataLoader(
                Pool(), collate_fn=functools.partial(collate_scaled, v)
            )
        },
        "collate.args[0]",
    ),
    "slope": (
        lambda v: {"model": with_activation(nn.LeakyReLU(v))},
        "model.2.negative_slope",
    ),
    "activation": (
        lambda v: {"model": with_activation(Activated(F.relu if v == 1 else F.gelu))},
        "model.2.activation",
    ),
    "activation-in-c": (
        lambda v: {
            "model": with_activation(Activated(torch.sigmoid if v == 1 else torch.sin))
        },
        "model.2.activation",
    ),
    "hidden": (
        lambda v: {"model": with_activation(Activated(F.relu, lambda x: v * x))},
        "model.2._hidden[0].v",
    ),
    "hook": (lambda v: {"model": hooked(v)}, "model.2._forward_hooks[0].factor"),
    "class": (
        lambda v: {"model": other_class(v)},
        "model.2.__class__.forward",
    ),
    "score": (
        lambda v: {"score": lambda factors: v * factors.norms()},
        "score function.v",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_folder_is_for_one_computation(name, tmp_path):
    make, path = JOBS[name]
    first = scores(**make(1.0), folder=tmp_path)
    again = scores(**make(1.0), folder=tmp_path)  # of new objects
    np.testing.assert_array_equal(first, again)
    with pytest.raises(ValueError, match=f" {re.escape(path)}[^ ]* was .* and is "):
        scores(**make(0.5), folder=tmp_path)


def test_numbers_are_told(tmp_path):
    scores(model=with_activation(nn.LeakyReLU(0.1)), folder=tmp_path)
    told = r"holds scores of something else: model\.2\.negative_slope was '0\.1' and "
    with pytest.raises(ValueError, match=told + r"is '0\.5'. Give another folder"):
        scores(model=with_activation(nn.LeakyReLU(0.5)), folder=tmp_path)


def reading(file: Any):
    def loss(logits, targets):
        assert file is not None
        return powered(logits, targets)

    return loss


def test_what_cannot_be_compared_needs_a_tag(tmp_path):
    function = ctypes.CDLL(None).abs
    with open(os.devnull) as file:
        for value in (file, threading.Lock(), function, (x for x in ())):
            job = {"loss": reading(value), "folder": tmp_path}
            with pytest.raises(TypeError, match=r"^loss\.file is a .* Pass tag=, a "):
                scores(**job)
        for tag in (None, 3):
            with pytest.raises(TypeError, match="tag"):
                scores(loss=reading(file), folder=tmp_path, tag=tag)
        assert not list(tmp_path.iterdir())
        scores(loss=reading(file))  # without a folder nothing is compared
        scores(loss=reading(file), folder=tmp_path, tag="version 1")
        scores(loss=reading(file), folder=tmp_path, tag="version 1")
        with pytest.raises(ValueError, match="tag was 'version 1' and is 'version 2'"):
            scores(loss=reading(file), folder=tmp_path, tag="version 2")
        other = {"folder": tmp_path / "other", "tag": ""}
        scores(**through_partial(0.5), **other)
        with pytest.raises(ValueError, match="label_smoothing"):
            scores(**through_partial(1.0), **other)


def test_functions_in_c_have_names():
    values = (torch.relu, F.conv2d, F.linear, F.gelu, torch.Tensor.relu, math.sqrt)
    values += (operator.add, operator.itemgetter(1), np.log, np.add.reduce)
    found = [tuple(fingerprint({"f": value}).items()) for value in values]
    assert len(set(found)) == len(values)
    assert dict(found[0]) == {"f": "torch.relu", "version of torch": torch.__version__}


def test_attributes_that_do_not_compute_are_not_compared():
    model, other = make_model(), make_model().eval()
    trained = torch.optim.SGD(other.parameters(), 0.1)
    other(torch.zeros(1, 2, 6)).sum().backward()
    trained.zero_grad(set_to_none=False)
    other.register_state_dict_post_hook(lambda *_: None)
    assert fingerprint({"model": model}) == fingerprint({"model": other})


def test_a_replaced_method_of_an_installed_class_is_found(tmp_path, monkeypatch):
    job = {"model": with_activation(nn.LeakyReLU()), "folder": tmp_path}
    scores(**job)
    monkeypatch.setattr(nn.LeakyReLU, "forward", lambda self, x: 2 * x)
    with pytest.raises(ValueError, match=r"model\.2\.__class__\.forward was None and"):
        scores(**job)


def test_what_transformers_notes_in_an_object_is_not_its_value():
    value = Weighted(1.0)
    found = fingerprint({"loss": value})
    value.deprecation_warnings = {"Asking-to-pad-a-fast-tokenizer": True}
    value._original_object_hash = hash("a text")
    assert fingerprint({"loss": value}) == found


def test_circles_and_shared_modules_end():
    def again(x):
        return again(x - 1) if x else model(x)

    model = make_model()
    model.parent = [model]
    model.append(model[0])
    found = fingerprint({"f": again, "model": model})
    assert found["f.again"] == "see f"
    assert found["f.model.parent[0]"] == found["model"] == "see f.model"
    assert found["f.model.6"] == "see f.model.0"


def test_large_values_are_one_line():
    text = fingerprint({"x": {n: str(n) for n in range(1000)}})
    assert [*text] == ["x"]
    other = fingerprint({"x": {n: str(n) if n else "" for n in range(1000)}})
    assert text != other
    assert fingerprint({"x": "a" * 1000}) != fingerprint({"x": "a" * 999 + "b"})


CODE = '''
import functools
import torch.nn.functional as F
from torch import nn

RATES = {"a": 0.1, "b": (1, 2.5, -0.0)}
KINDS = {"mean", "sum", "none", "other"}

class Net(nn.Module):
    sizes = frozenset({"x", "y", "z"})

    def __init__(self, slope=0.1):
        super().__init__()
        self.act, self.parts = functools.partial(F.leaky_relu, slope), set("abcde")

    def forward(self, x):
        if self.parts in ({"u", "v"}, {"w"}) or len(x) in {1, 2}:
            raise ValueError("no")
        return self.act(x) * RATES["a"]

def make(weight=2.0):
    def loss(logits, targets, *, kinds=KINDS):
        """Returns the losses."""
        try:
            return weight * helper(logits, targets)
        finally:
            del kinds
    return loss

def helper(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")
'''
READ = """
import importlib.util, json, sys
from per_sample_grad.pool.fingerprint import fingerprint
spec = importlib.util.spec_from_file_location("mine", sys.argv[1])
mine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mine)
found = fingerprint({"model": mine.Net(), "loss": mine.make()})
"""


def test_another_process_and_new_comments_find_the_same(tmp_path):
    paths = [tmp_path / "first.py", tmp_path / "folder" / "second.py"]
    paths[1].parent.mkdir()
    paths[0].write_text(CODE)
    paths[1].write_text("# A comment.\n\n\n" + CODE.replace("the losses", "losses"))
    own = {}
    exec(READ.replace("sys.argv[1]", repr(str(paths[0]))), own)
    run = subprocess.run(
        [sys.executable, "-c", READ + "print(json.dumps(found))", str(paths[1])],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": "7",
        },
    )
    assert json.loads(run.stdout) == own["found"]
    assert "loss.helper" in own["found"]
    assert own["found"]["model.__class__.forward.RATES['a']"] == "0.1"


def test_a_description_is_a_small_part_of_the_work(tmp_path):
    """What names a library's code is not read, and values are read once."""
    asked = Pool()
    scores(loader=asked, folder=tmp_path)
    assert len(json.loads((tmp_path / "pool.json").read_text())) < 100
    first = sorted({0, COUNT // 2, COUNT - 1})
    assert asked.asked == first + first + list(range(COUNT))
