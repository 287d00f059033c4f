"""A description is that of the same code, constants, attributes and tensors alone."""

import collections
import ctypes
import enum
import functools
import json
import re
import runpy
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.pool import Pool, scores
from support.scripts import python, written
from support.xla_replica.replicas import of_torch_alone
from torch import nn

from per_sample_grad.pool.blocks import compared_items
from per_sample_grad.pool.fingerprint import fingerprint

FACTOR = 1.0
Point = collections.namedtuple("Point", "x y")
Kind = enum.Enum("Kind", "A B")


def scaled(x):
    return FACTOR * x


def closure(factor: Any):
    def loss(logits, targets, *, scale=factor):
        return factor, logits, targets

    return loss


@torch.no_grad()
def decorated(logits):
    return [scaled(each) for each in logits]


def by_global(factor: float):
    globals()["FACTOR"] = factor
    return decorated


def lambdas(factor: float):
    found = [lambda x, y: x.sum(1)
             + 1,
             lambda x, y: x.sum(1)
             + 2]  # fmt: skip
    return found[int(factor)]


class Weighted:
    """A loss that is an object's method."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def loss(self, logits, targets):
        return self.factor


def hooked(factor: float) -> nn.Module:
    model = nn.Sequential(nn.ReLU())
    model[0].register_forward_hook(lambda module, inputs, out: factor * out)
    return model


def class_with(part: Any, *bases: type) -> type:
    return type("Own", bases, {"part": part})


# What makes a value of a number, and what differs between those of 1 and 0.
JOBS = {
    "lambda": (lambdas, ""),
    "partial": (lambda v: functools.partial(max, key=v), ".keywords"),
    "closure": (closure, ".factor"),
    "wrapper": (lambda v: functools.wraps(F.cross_entropy)(closure(v)), ".factor"),
    "global": (by_global, ".func.scaled.FACTOR"),
    "default": (closure, ".__kwdefaults__"),
    "method": (lambda v: Weighted(v).loss, ".__self__.factor"),
    "module": (nn.LeakyReLU, ".negative_slope"),
    "tensor": (lambda v: nn.NLLLoss(torch.full((3,), v)), ".weight"),
    "in-a-list": (lambda v: [closure(v)], "[0].factor"),
    "in-c": (lambda v: [torch.sin, torch.cos][int(v)], ".(arguments)[1]"),
    "hook": (hooked, ".0._forward_hooks[0].factor"),
    "class": (lambda v: class_with(lambdas(v), nn.Module)(), ".__class__.part"),
    "property": (lambda v: class_with(property(closure(v))), ".part.fget.factor"),
    "class-part": (lambda v: class_with(functools.partial(max, v)), ".part.args"),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_what_computes_otherwise_is_told_by_its_path(name):
    make, path = JOBS[name]
    one, again, other = (fingerprint({"loss": make(v)}) for v in (1.0, 1.0, 0.0))
    assert one == again  # of new objects
    assert one[f"loss{path}"] != other[f"loss{path}"]


@pytest.mark.parametrize(("one", "other"), [
    (Point(1, 2), Point(1, 3)), (Kind.A, Kind.B), (Path("a"), Path("b")),
    (re.compile("a"), re.compile("b")), ({"a", "b"}, {"a", "c"}), (1, True),
    (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    (np.float32(1), np.float32(2)), (np.ones(3), np.ones(2)),
    (np.array([None, 1]), np.array([None, 2])),
    (torch.float16, torch.bfloat16), (torch.ones(3), torch.ones(3).half()),
    (functools.cache(scaled), functools.cache(decorated)), (F.relu, F.gelu),
    (iter([1]), iter([2])), (b"a" * 100, b"a" * 99 + b"b"),
    (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    (types.MethodType(closure(1), 0), types.MethodType(closure(2), 0)),
    ({n: str(n) for n in range(999)}, {n: str(n % 998) for n in range(999)}),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_values_of_every_kind_are_told_apart_in_a_few_lines(one, other):
    assert fingerprint({"value": one}) == fingerprint({"value": one})
    assert fingerprint({"value": one}) != fingerprint({"value": other})
    assert len(fingerprint({"value": one})) < 50


def test_what_cannot_be_compared_needs_a_tag(tmp_path):
    pair = [lambda z, y: z.sum(1), lambda z, y: z.mean(1)]
    typed: dict[str, Any] = {}
    exec("def loss(logits, targets): return logits.sum(1)", typed)
    lock, abs_of_c = threading.Lock(), ctypes.CDLL(None).abs
    values = [sys.__stdout__, lock, abs_of_c, (x for x in ()), typed["loss"], pair[0]]
    for value in (*values, types.ModuleType("own")):
        with pytest.raises(TypeError, match=r"^value is a .* Pass tag=, a "):
            fingerprint({"value": value})

    def loss(logits, targets, smoothing=0.5):
        assert lock is not None
        return F.cross_entropy(logits, targets, reduction="none") + smoothing

    scores(loss=loss)  # without a folder nothing is compared
    with pytest.raises(TypeError, match=r"^loss\.lock is a .* Pass tag=, a "):
        scores(loss=loss, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        scores(loss=loss, folder=tmp_path, tag="version 1")
    with pytest.raises(ValueError, match="tag was 'version 1' and is 'version 2'"):
        scores(loss=loss, folder=tmp_path, tag="version 2")
    loss.__defaults__ = (0.25,)  # what can be compared, still is
    with pytest.raises(ValueError, match=r"__defaults__ was 'tuple of 1 \[0.5\]' and"):
        scores(loss=loss, folder=tmp_path, tag="version 1")


def test_attributes_that_do_not_compute_are_not_compared():
    model, value = Pool.model(), Weighted(1.0)
    truth = fingerprint({"model": model, "value": value})
    model.eval()(torch.zeros(1, 2, 6)).sum().backward()
    model.register_state_dict_post_hook(lambda *_: None)
    model._trainer = threading.Lock()  # as Lightning's, which pickle leaves out
    # What transformers notes in an object.
    value.deprecation_warnings = {"Asking-to-pad-a-fast-tokenizer": True}
    value._original_object_hash = hash("a text")
    assert fingerprint({"model": model, "value": value}) == truth


def test_a_replaced_method_of_an_installed_class_is_found(monkeypatch):
    truth = fingerprint({"model": nn.LeakyReLU()})
    monkeypatch.setattr(nn.LeakyReLU, "forward", lambda self, x: 2 * x)
    assert fingerprint({"model": nn.LeakyReLU()})["model.forward"].startswith("source")
    assert truth["model.forward"].startswith("torch.nn.modules.activation.LeakyReLU.")


def test_circles_and_shared_modules_end():
    def forward(model, x, again=None):
        return model(x) if again else forward(model, x, forward)

    model = Pool.model()
    model.parent = [model]
    model.append(nn.Identity()).append(model[6])
    found = fingerprint({"model": model, "forward": forward})
    assert found["forward.forward"] == "see forward"
    assert found["model.parent[0]"] == "see model"
    assert found["model.7"] == "see model.6"


CODE = """
import json
from torch import nn
from typing import Optional, TypeVar
from per_sample_grad.pool.fingerprint import fingerprint

RATES = {"a": 0.1, "b": (1, 2.5, -0.0)}

class Net(nn.Module):
    sizes = frozenset({"x", "y", "z"})
    Kind = TypeVar("Kind", bound=Optional[dict])

    def __init__(self):
        super().__init__()
        self.parts = set("abcde")

    def forward(self, x):
        return x * RATES["a"] if self.parts in ({"u", "v"}, {"w"}) else x

def make(weight=2.0):
    def loss(logits, targets, *, kinds={"mean", "sum", "none"}):
        return weight * helper(logits, targets)
    return loss

def helper(logits, targets):
    return logits[targets]

print(json.dumps(fingerprint({"model": Net(), "loss": make()})))
"""


@of_torch_alone
def test_another_process_and_new_comments_find_the_same(tmp_path, capsys):
    runpy.run_path(str(written(tmp_path, CODE)))
    found = json.loads(capsys.readouterr().out)
    commented = "# A comment.\n\n" + CODE.replace("2.0):", "2.0):  # to score")
    done = python(written(tmp_path, commented), PYTHONHASHSEED="7")
    assert json.loads(done.stdout) == found
    assert "loss.helper" in found
    assert "('a', 0.1)" in found["model.__class__.forward.RATES"]


def test_a_description_is_a_small_part_of_the_work(tmp_path):
    """A library's code is named, not read, and values are read once."""
    asked = Pool()
    scores(pool=asked, folder=tmp_path)
    assert len(json.loads((tmp_path / "pool.json").read_text())) < 100
    first = compared_items(Pool.size)
    assert asked.asked == first + first + list(range(Pool.size))
