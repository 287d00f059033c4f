"""Kept scores are those of the same code, constants, attributes and tensors."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.pool import CLASSES, COUNT, Pool, make_model
from support.scripts import python
from torch import nn
from torch.utils.data import DataLoader, default_collate

import per_sample_grad as psg
from per_sample_grad.pool.items import compared_items


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


FACTOR = 1.0


def scaled(x):
    return FACTOR * x


def with_global(factor: float):
    def loss(logits, targets):
        return torch.stack([scaled(each) for each in powered(logits, targets)])

    globals()["FACTOR"] = factor
    return loss


def module_of(path: Path) -> types.ModuleType:
    """Returns a file of Python, imported."""
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hooked(factor: float) -> nn.Module:
    model = make_model()
    model[2].register_forward_hook(lambda module, inputs, out: factor * out)
    return model


def other_class(factor: float) -> nn.Module:
    forward = {1.0: lambda self, x: 1.0 * x, 0.5: lambda self, x: 2.0 * x}[factor]
    return with_activation(type("Scaled", (nn.Module,), {"forward": forward})())


def through_partial(value: float) -> functools.partial:
    options = {"label_smoothing": value, "reduction": "none"}
    return functools.partial(F.cross_entropy, **options)


def formatted(value: float) -> nn.Module:
    activated = Activated(F.relu)
    kind = torch.channels_last if value == 1 else torch.contiguous_format
    activated.last = (..., torch.strided, Literal[3], kind)
    return with_activation(activated)


def lambdas(value: float) -> Any:
    """Their source text is the same, whichever is chosen of the line."""
    return {1.0: lambda z, y: z.sum(1), 0.5: lambda z, y: z.mean(1)}[value]


def collate_scaled(factor: float, samples):
    return default_collate([(factor * x, y) for x, y in samples])


# An argument, what makes it of a number, and what differs between those of 1 and 0.5.
JOBS: dict[str, tuple[str, Any, str]] = {
    "lambda": ("loss", lambdas, "loss was 'source"),
    "partial": ("loss", through_partial, "loss.keywords['label_smoothing']"),
    "module": ("loss", lambda v: nn.CrossEntropyLoss(
        label_smoothing=v, reduction="none"), "loss.label_smoothing"),
    "tensor": ("loss", lambda v: nn.CrossEntropyLoss(
        torch.full((CLASSES,), v), reduction="none"), "loss.weight"),
    "closure": ("loss", closure, "loss.factor"),
    "default": ("loss", lambda v: lambda x, y, power=v: powered(x, y, power),
                "loss.__defaults__[0]"),
    "object": ("loss", Weighted, "loss.factor"),
    "method": ("loss", lambda v: Weighted(v).loss, "loss.__self__.factor"),
    "global": ("loss", with_global, "loss.scaled.FACTOR"),
    "forward": ("forward", lambda v: lambda model, x: model(v * x), "forward.v"),
    "split": ("split", lambda v: lambda batch: (v * batch[0], batch[1]), "split.v"),
    "collate": ("loader", lambda v: DataLoader(
        Pool(), collate_fn=functools.partial(collate_scaled, v)), "collate.args[0]"),
    "slope": ("model", lambda v: with_activation(nn.LeakyReLU(v)),
              "model.2.negative_slope was '1.0' and is '0.5'. Give another folder"),
    "activation": ("model", lambda v: with_activation(
        Activated(F.relu if v == 1 else F.gelu)), "model.2.activation"),
    "activation-in-c": ("model", lambda v: with_activation(
        Activated(torch.sigmoid if v == 1 else torch.sin)), "model.2.activation"),
    "format": ("model", formatted, "model.2.last[3]"),
    "hidden": ("model", lambda v: with_activation(
        Activated(F.relu, lambda x: v * x)), "model.2._hidden[0].v"),
    "hook": ("model", hooked, "model.2._forward_hooks[0].factor"),
    "class": ("model", other_class, "model.2.__class__.forward"),
    "score": ("score", lambda v: lambda f: v * f.norms(), "score function.v"),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_a_folder_is_for_one_computation(name, tmp_path):
    argument, make, path = JOBS[name]
    first = scores(**{argument: make(1.0)}, folder=tmp_path)
    again = scores(**{argument: make(1.0)}, folder=tmp_path)  # of new objects
    np.testing.assert_array_equal(first, again)
    told = f"holds scores of something else: .*{re.escape(path)}"
    with pytest.raises(ValueError, match=told):
        scores(**{argument: make(0.5)}, folder=tmp_path)


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
        scores(loss=through_partial(0.5), **other)
        with pytest.raises(ValueError, match="label_smoothing"):
            scores(loss=through_partial(1.0), **other)


def test_attributes_that_do_not_compute_are_not_compared(tmp_path):
    scores(model=make_model(), folder=tmp_path)
    other = make_model().eval()
    trained = torch.optim.SGD(other.parameters(), 0.1)
    other(torch.zeros(1, 2, 6)).sum().backward()
    trained.zero_grad(set_to_none=False)
    other.register_state_dict_post_hook(lambda *_: None)
    other._trainer = threading.Lock()  # as Lightning's, which pickle leaves out
    value = Weighted(1.0)
    folder = tmp_path / "transformers"
    for _ in range(2):
        scores(model=other, loss=value, folder=folder)
        # What transformers notes in an object.
        value.deprecation_warnings = {"Asking-to-pad-a-fast-tokenizer": True}
        value._original_object_hash = hash("a text")
    scores(model=other, folder=tmp_path)


def test_a_replaced_method_of_an_installed_class_is_found(tmp_path, monkeypatch):
    job = {"model": with_activation(nn.LeakyReLU()), "folder": tmp_path}
    scores(**job)
    monkeypatch.setattr(nn.LeakyReLU, "forward", lambda self, x: 2 * x)
    with pytest.raises(ValueError, match=r"model\.2\.forward was 'torch.* and is 'so"):
        scores(**job)


def test_circles_and_shared_modules_end(tmp_path):
    def forward(model, x, again=None):
        return model(x) if again else forward(model, x, forward)

    model = make_model()
    model.parent = [model]
    model.append(nn.Identity()).append(model[6])
    scores(model=model, forward=forward, folder=tmp_path)
    found = json.loads((tmp_path / "pool.json").read_text())
    assert found["forward.forward"] == "see forward"
    assert found["model.parent[0]"] == "see model"
    assert found["model.7"] == "see model.6"


def test_large_values_are_one_line(tmp_path):
    values = {n: str(n) for n in range(1000)}

    def with_values(values):
        return lambda x, y: powered(x, y) * len(values) / 1000

    scores(loss=with_values(values), folder=tmp_path)
    assert len(json.loads((tmp_path / "pool.json").read_text())) < 100
    for other in ({**values, 0: ""}, "a" * 1000):
        with pytest.raises(ValueError, match=r" loss\.values was '1001 parts "):
            scores(loss=with_values(other), folder=tmp_path)


def test_modules_and_functions_without_source_text(tmp_path):
    """A file that is imported counts as a whole, and what is typed in needs a tag."""
    path = tmp_path / "mine.py"
    for number, changed in enumerate(("0.5", "(0.5)", "1.0")):
        path = tmp_path / f"mine{number}.py"
        path.write_text(f"def halved(x):\n    return {changed} * x\n")
        mine = module_of(path)
        job = {"loss": lambda x, y, mine=mine: mine.halved(powered(x, y))}
        job["folder"] = tmp_path / "scores"
        if number == 2:
            with pytest.raises(ValueError, match=r"__defaults__\[0\] was 'source"):
                scores(**job)
        else:
            scores(**job)
    typed = {}
    exec("def loss(logits, targets): return logits.sum(1)", typed)
    job = {"loss": typed["loss"], "folder": tmp_path / "typed"}
    with pytest.raises(TypeError, match=r"^loss is a builtins\.function, .*tag="):
        scores(**job)
    scores(**job, tag="a sum")


CODE = '''
import functools
import torch.nn.functional as F
from torch import nn
from typing import Optional, TypeVar

RATES = {"a": 0.1, "b": (1, 2.5, -0.0)}
KINDS = {"mean", "sum", "none", "other"}

class Net(nn.Module):
    sizes = frozenset({"x", "y", "z"})
    Kind = TypeVar("Kind", bound=Optional[dict])

    def __init__(self, slope=0.1):
        super().__init__()
        self.act = functools.partial(F.leaky_relu, negative_slope=slope)
        self.parts = set("abcde")

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
SCORE = """
import sys
import per_sample_grad as psg
from support.per_sample_grad.pool import Pool, make_model
from test_per_sample_pool_fingerprint import module_of
mine = module_of(sys.argv[1])
model = make_model().append(mine.Net())
psg.score_pool(model, Pool(), loss=mine.make(), folder=sys.argv[2], progress=False)
"""


def test_another_process_and_new_comments_find_the_same(tmp_path):
    paths = [tmp_path / "first.py", tmp_path / "folder" / "second.py"]
    paths[1].parent.mkdir()
    paths[0].write_text(CODE)
    paths[1].write_text("# A comment.\n\n" + CODE.replace("try:", "try:  # to score"))
    mine, folder = module_of(paths[0]), tmp_path / "scores"
    model = make_model().append(mine.Net())
    scores(model=model, loss=mine.make(), folder=folder)
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    done = python("-c", SCORE, paths[1], folder, **variables)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "pool.json").read_text())
    assert "loss.helper" in found
    assert found["model.6.__class__.forward.RATES['a']"] == "0.1"


def test_a_description_is_a_small_part_of_the_work(tmp_path):
    """What names a library's code is not read, and values are read once."""
    asked = Pool()
    scores(loader=asked, folder=tmp_path)
    assert len(json.loads((tmp_path / "pool.json").read_text())) < 100
    first = compared_items(COUNT)
    assert asked.asked == first + first + list(range(COUNT))
