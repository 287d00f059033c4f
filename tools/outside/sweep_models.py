"""Finds which models of other libraries have every sample's gradient norm, and how.

    python tools/outside/sweep_models.py
    python tools/outside/sweep_models.py --library timm --output result.json

Every model has random weights, in float64, and three samples. Its norms, by one
backward pass, are compared with a loop over the samples. A model is

- 'covered' if layer rules account for all parameters;
- 'fallback' if some need ``fallback="loop"``;
- 'refused' if there is an error in place of an answer.

An answer that is wrong ends the sweep. The result is a file that the tests compare with
(test/outside/test_model_sweep.py) and the table of docs/outside.md; both are written
here. Needs transformers, timm and torchvision: pip install -e '.[outside]'.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
from tools.outside.models import LIBRARIES, Case

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "benchmarks" / "outside_models.json"
PAGE = ROOT / "docs" / "outside.md"
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
OUTCOMES = ("refused", "fallback", "covered")  # from worst to best
TOLERANCE = 1e-9  # of the loop's norm
# The same for models that compute a part in float32 whatever their dtype, as norms do.
FLOAT32_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of a model.

    Attributes:
        outcome: One of `OUTCOMES`.
        parameters: The number of its trainable parameters (tensors).
        uncovered: Those of them that no layer rule accounts for.
        reason: What these belong to, or why the model is refused; of a covered one the
            options that it needs.
    """

    outcome: str
    parameters: int
    uncovered: int
    reason: str

    def rank(self) -> tuple[int, int]:
        """Returns what grows as coverage improves."""
        return OUTCOMES.index(self.outcome), -self.uncovered


class WrongNorms(AssertionError):
    """Norms differ from those of a loop over the samples, without an error."""


def loop_norms(case: Case, model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    """Returns ``(B,)``: the norms by one forward and backward pass for each sample."""
    params = [param for param in model.parameters() if param.requires_grad]
    norms = []
    for sample in range(len(batch[0])):
        [loss] = case.losses(model, *(each[sample : sample + 1] for each in batch))
        found = torch.autograd.grad(loss, params, allow_unused=True)
        squares = [grad.double().square().sum() for grad in found if grad is not None]
        norms.append(torch.stack(squares).sum().sqrt())
    return torch.stack(norms)


class _Float32Seen(TorchDispatchMode):
    """Notices whether anything is computed in float32 or less."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                self.seen |= each.dtype != torch.float64
        return found


def examine(case: Case) -> Found:
    """Returns what becomes of a model.

    Raises:
        WrongNorms: Its norms are wrong.
    """
    model, batch = case.built(torch.float64)
    count = sum(param.requires_grad for param in model.parameters())
    try:
        with _Float32Seen() as narrow:
            expected = loop_norms(case, model, batch)
        tolerance = FLOAT32_TOLERANCE if narrow.seen else TOLERANCE
    except RuntimeError:  # an operation that has no float64
        model, batch = case.built(torch.float32)
        expected, tolerance = loop_norms(case, model, batch), FLOAT32_TOLERANCE

    def compare(fallback: str) -> None:
        norms = psg.per_sample_grad_norms(
            model, case.losses, batch, fallback=fallback, **case.options
        )
        error = ((norms - expected).abs() / expected).max().item()
        if not error < tolerance:
            raise WrongNorms(
                f"norms {norms.tolist()} differ from {expected.tolist()} by {error:.1e}"
            )

    try:
        compare("error")
        told = (f"{name}={value}" for name, value in case.options.items())
        return Found("covered", count, 0, ", ".join(told))
    except psg.PerSampleError:
        pass
    try:
        report = psg.coverage(model, case.losses, batch, **case.options)
        compare("loop")
    except psg.PerSampleError as refusal:
        return Found("refused", count, count, first_sentence(refusal))
    uncovered = [
        name
        for name, found in report.parameters.items()
        if found.problems or not found.correct
    ]
    return Found("fallback", count, len(uncovered), owners(model, uncovered))


def owners(model: nn.Module, names: list[str]) -> str:
    """Returns the classes of the modules that own parameters, most frequent first."""
    modules = (model.get_submodule(name.rpartition(".")[0]) for name in names)
    classes = Counter(_class_name(module) for module in modules)
    return ", ".join(f"{name} ({count})" for name, count in classes.most_common())


def _class_name(module: nn.Module) -> str:
    """Returns a class's name; with its library's if torch has another of this name."""
    library, name = type(module).__module__.split(".")[0], type(module).__name__
    return f"{library}.{name}" if library != "torch" and hasattr(nn, name) else name


def first_sentence(error: Exception) -> str:
    """Returns what an error says first, on one line."""
    text = " ".join(str(error).split())
    return re.split(r"[:;] ", text)[0][:160]


def versions(library: str) -> dict[str, str]:
    """Returns the versions that a library's outcomes hold for."""
    found = {name: importlib.metadata.version(name) for name in ("torch", library)}
    return {name: each.split("+")[0] for name, each in found.items()}


def sweep(library: str) -> dict[str, Any]:
    """Returns the outcome of each of a library's models."""
    models = {}
    for name, case in LIBRARIES[library]().items():
        found = examine(case)
        models[name] = dataclasses.asdict(found)
        print(f"{library}/{name}: {found.outcome} {found.reason}")
    return {"versions": versions(library), "models": models}


def recorded() -> dict[str, Any]:
    """Returns what the last sweep has found, by library."""
    return json.loads(RESULT.read_text(encoding="utf-8"))


def worse(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the models of a library that a new sweep finds worse, or not at all."""
    return [
        name
        for name, each in before.items()
        if name not in after or Found(**after[name]).rank() < Found(**each).rank()
    ]


def table(result: dict[str, Any]) -> str:
    """Returns the Markdown of a sweep's result.

    A model that is not covered has a reason, and so has one that needs an option.
    """
    lines = []
    for library, swept in result.items():
        found = {name: Found(**each) for name, each in swept["models"].items()}
        counts = Counter(each.outcome for each in found.values())
        total = ", ".join(f"{counts[each]} {each}" for each in reversed(OUTCOMES))
        which = ", ".join(f"{k} {v}" for k, v in swept["versions"].items())
        lines += [f"### {library}", "", f"{len(found)} models: {total} ({which}).", ""]
        plain = [
            f"{name} ({each.parameters})"
            for name, each in sorted(found.items())
            if each.outcome == "covered" and not each.reason
        ]
        lines += [f"Covered, by the number of parameters: {', '.join(plain)}.", ""]
        others = {name: each for name, each in found.items() if each.reason}
        if others:
            lines += ["| model | outcome | parameters | why not by rules; options |"]
            lines += ["|---|---|---|---|"]
        for name, each in sorted(others.items()):
            number = str(each.parameters)
            if each.outcome == "fallback":
                number = f"{each.uncovered} of {number}"
            lines.append(f"| {name} | {each.outcome} | {number} | {each.reason} |")
        lines += [""] * bool(others)
    return "\n".join(lines)


def page_with(text: str) -> str:
    """Returns the page with the table between its marks replaced."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Sweeps, and writes the result and the page's table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", choices=LIBRARIES, help="only this one")
    parser.add_argument("--output", type=Path, help="write there, and not the page")
    parser.add_argument(
        "--allow-worse", action="store_true", help="as after a change of versions"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    result = recorded() if RESULT.exists() else {}
    for library in [arguments.library] if arguments.library else LIBRARIES:
        before, result[library] = result.get(library, {}), sweep(library)
        lost = worse(before.get("models", {}), result[library]["models"])
        if lost and not arguments.allow_worse:
            parser.error(f"{library}: worse than recorded: {', '.join(lost)}")
    text = json.dumps(result, indent=2) + "\n"
    (arguments.output or RESULT).write_text(text, encoding="utf-8")
    if not arguments.output:
        PAGE.write_text(page_with(table(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
