"""Every activation and loss of `torch.nn`, made ready to run: one row each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.modules import activation, loss

WIDTH = 6
SHAPE = (4, 3, 5, WIDTH)  # samples, channels, height, features

# Options without which a module cannot be made, or that choose another formula. Every
# activation is also run as it is, and with ``inplace=True`` where it has that option.
ACTIVATION_OPTIONS: dict[str, list[dict[str, object]]] = {
    "ELU": [{"alpha": 0.7}],
    "CELU": [{"alpha": 0.7}],
    "GELU": [{"approximate": "tanh"}],
    "LeakyReLU": [{"negative_slope": 0.3}],
    "PReLU": [{"num_parameters": SHAPE[1]}],
    "Softplus": [{"beta": 2.0, "threshold": 1.0}],
    "Softmax": [{"dim": -1}],
    "LogSoftmax": [{"dim": -1}],
    "Softmin": [{"dim": -1}],
    "Threshold": [{"threshold": 0.1, "value": -1.0}],
}
NEEDS_OPTIONS = {"Softmax", "LogSoftmax", "Softmin", "Threshold"}
INPLACE = {
    "CELU", "ELU", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "Mish",
    "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Threshold",
}  # fmt: skip
# Compared by the tests of its own layer rule.
OTHER_ACTIVATIONS = {"MultiheadAttention"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A module of `torch.nn`, and how a small model uses it.

    Attributes:
        name: The test's id.
        build: Makes the module.
        loss: From the module and a Linear's output, of shape `SHAPE`, to one number.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]


def fold(out: torch.Tensor) -> torch.Tensor:
    """Returns a linear function of all numbers, which differ in their gradients."""
    coefficients = torch.cos(torch.arange(out.numel(), dtype=torch.float32))
    return (out * coefficients.view(out.shape).to(out.device)).sum()


def activations() -> list[Operation]:
    found = []
    for name in sorted(set(activation.__all__) - OTHER_ACTIVATIONS):
        variants = [] if name in NEEDS_OPTIONS else [{}]
        variants += ACTIVATION_OPTIONS.get(name, [])
        if name in INPLACE:
            variants += [{**variants[0], "inplace": True}]
        for options in variants:
            text = ", ".join(f"{key}={value}" for key, value in options.items())
            found.append(
                Operation(
                    f"{name}({text})",
                    lambda name=name, options=options: getattr(nn, name)(**options),
                    # Its input is not a leaf, so that it may be changed in place.
                    lambda module, x: fold(module(x * 2.0)),
                )
            )
    return found


def _target(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns a target of a kind for numbers ``x``, (N, C, *), the same always."""
    values = torch.sin(1.7 * torch.arange(x.numel(), dtype=torch.float32)).view(x.shape)
    match kind:
        case "value":
            found = values
        case "probability":
            found = values.softmax(1)
        case "bit":
            found = (values > 0).float()
        case "sign":
            found = torch.where(values > 0, 1.0, -1.0)
        case "class":
            found = values.argmax(1)
        case "classes":  # of each sample, ending with -1
            found = torch.tensor([[1, 3, -1, 0, 0, 0]]).expand(len(x), -1).contiguous()
    return found.to(x.device)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2)


def _two(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = _flat(x)
    return module(rows, _target(rows, "value") * 0.5 + rows.roll(1, 1))


# How each loss is called, with a (N, C) matrix of numbers from a Linear.
LOSSES: Mapping[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "L1Loss": _two,
    "MSELoss": _two,
    "SmoothL1Loss": _two,
    "HuberLoss": _two,
    "NLLLoss": lambda m, x: m(
        _flat(x).log_softmax(1), _target(_flat(x), "class")
    ),
    "NLLLoss2d": lambda m, x: m(x.log_softmax(1), _target(x, "class")),
    "PoissonNLLLoss": lambda m, x: m(
        _flat(x) if m.log_input else _flat(x).square() + 0.1,
        _target(_flat(x), "value").abs(),
    ),
    "GaussianNLLLoss": lambda m, x: m(
        _flat(x), _target(_flat(x), "value"), _flat(x).square() + 0.1
    ),
    "KLDivLoss": lambda m, x: m(
        _flat(x).log_softmax(1), _target(_flat(x), "probability")
    ),
    "BCELoss": lambda m, x: m(_flat(x).sigmoid(), _target(_flat(x), "bit")),
    "BCEWithLogitsLoss": lambda m, x: m(_flat(x), _target(_flat(x), "bit")),
    "HingeEmbeddingLoss": lambda m, x: m(_flat(x), _target(_flat(x), "sign")),
    "MultiLabelMarginLoss": lambda m, x: m(_flat(x), _target(_flat(x), "classes")),
    "SoftMarginLoss": lambda m, x: m(_flat(x), _target(_flat(x), "sign")),
    "CrossEntropyLoss": lambda m, x: m(_flat(x), _target(_flat(x), "class")),
    "MultiLabelSoftMarginLoss": lambda m, x: m(_flat(x), _target(_flat(x), "bit")),
    "CosineEmbeddingLoss": lambda m, x: m(
        _flat(x), _flat(x).roll(1, 1) * 2, _target(_flat(x), "sign")[:, 0]
    ),
    "MarginRankingLoss": lambda m, x: m(
        _flat(x), _flat(x).roll(1, 1), _target(_flat(x), "sign")
    ),
    "MultiMarginLoss": lambda m, x: m(_flat(x), _target(_flat(x), "class")),
    "TripletMarginLoss": lambda m, x: m(
        _flat(x), _flat(x).roll(1, 1), _flat(x).roll(2, 1)
    ),
    "TripletMarginWithDistanceLoss": lambda m, x: m(
        _flat(x), _flat(x).roll(1, 1), _flat(x).roll(2, 1)
    ),
    "CTCLoss": lambda m, x: m(
        _flat(x).unflatten(0, (15, 4)).log_softmax(2),
        torch.tensor([[1, 2, 3]] * 4, device=x.device),
        torch.full((4,), 15), torch.full((4,), 3),
    ),
}  # fmt: skip
# Other formulas of the same loss.
LOSS_OPTIONS: dict[str, list[dict[str, object]]] = {
    "CrossEntropyLoss": [{"label_smoothing": 0.2}, {"ignore_index": 2}],
    "KLDivLoss": [{"log_target": True}, {"reduction": "batchmean"}],
    "PoissonNLLLoss": [{"log_input": False}, {"full": True}],
    "GaussianNLLLoss": [{"full": True}],
    "MultiMarginLoss": [{"p": 2}],
    "SmoothL1Loss": [{"beta": 0.3}],
    "HuberLoss": [{"delta": 0.3}],
    "TripletMarginLoss": [{"p": 1.0}, {"swap": True}],
}


def losses() -> list[Operation]:
    found = []
    for name in sorted(loss.__all__):
        variants: list[dict[str, object]] = [
            {"reduction": each} for each in ("none", "mean", "sum")
        ]
        if name == "CTCLoss":
            variants = variants[1:]
        variants += LOSS_OPTIONS.get(name, [])
        for options in variants:
            text = ", ".join(f"{key}={value}" for key, value in options.items())
            call = LOSSES[name]
            found.append(
                Operation(
                    f"{name}({text})",
                    lambda name=name, options=options: getattr(nn, name)(**options),
                    lambda module, x, call=call: fold(call(module, x)),
                )
            )
    return found
