"""RNN, LSTM and GRU: Linears that are applied at every step of a sequence.

The steps are run again from the recorded inputs, and the gradient at what is added to
the hidden state's part of the gates is taken there, since the module's own graph may be
one operation. A module has several outputs, output and last states, whose gradients are
needed together: they are made parts of one tensor (`joined`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import rnn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
)

import xla_replica
from per_sample_grad.factors.forms import Contribution, Dense, Outer, accumulation_dtype
from per_sample_grad.layers import registry
from per_sample_grad.layers.registry import Call, register_rule
from xla_replica.common.trees import tensors_in


def joined(module: nn.Module, output: Any) -> tuple[torch.Tensor, Any] | None:
    """Returns one tensor ``(B, *)`` of all outputs, and these as parts of it.

    None where the outputs have no batch dimension.
    """
    sequence, states = output
    packed = sequence if isinstance(sequence, PackedSequence) else None
    lengths = None
    if packed is not None:
        sequence, lengths = pad_packed_sequence(packed, batch_first=True)
    elif sequence.dim() != 3:
        return None
    elif not module.batch_first:
        sequence = sequence.transpose(0, 1)
    given = tensors_in(states)
    # The samples are the second dimension of states.
    parts = [sequence, *(state.transpose(0, 1) for state in given)]
    one = torch.cat([part.flatten(1) for part in parts], 1)
    cut = one.split([part.shape[1:].numel() for part in parts], 1)
    cut = [each.unflatten(1, part.shape[1:]) for each, part in zip(cut, parts)]
    sequence, last = cut[0], [state.transpose(0, 1) for state in cut[1:]]
    last = [_laid_out_as(state, part) for state, part in zip(given, last)]
    if packed is None:
        sequence = sequence if module.batch_first else sequence.transpose(0, 1)
        sequence = _laid_out_as(output[0], sequence)
    else:
        order = packed.sorted_indices
        if order is not None:
            sequence, lengths = sequence.index_select(0, order), lengths[order.cpu()]
        data = pack_padded_sequence(sequence, lengths, batch_first=True).data
        sequence = PackedSequence(data, *packed[1:])
    return one, (sequence, tuple(last) if isinstance(states, tuple) else last[0])


def _laid_out_as(output: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns a part with the strides of the output that it stands for.

    Products of other strides are rounded in another way, and ``.grad`` with them.
    """
    if xla_replica.traits(output).is_lazy or output.stride() == part.stride():
        return part
    return torch.empty_like(output).copy_(part)


@dataclasses.dataclass
class _Sweep:
    """One pass over the steps by one layer in one direction.

    Attributes:
        suffix: The end of the names of its parameters.
        inputs: ``(T, B, q)``.
        gates: What the inputs add to the gates, ``(T, B, p)``, with a graph.
        before: The hidden state before each step, ``(T, B, *)``.
        resets: GRU's reset gates, ``(T, B, *)``.
        unprojected, projected: Of an LSTM with ``proj_size``: the hidden state before
            and after its projection, each step's.
    """

    suffix: str
    inputs: torch.Tensor
    gates: torch.Tensor
    before: torch.Tensor
    resets: torch.Tensor | None
    unprojected: list[torch.Tensor]
    projected: list[torch.Tensor]


@register_rule(rnn.RNN, rnn.LSTM, rnn.GRU, joining=joined)
def recurrent(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes a sequence, packed or not; ``grad`` is that of `joined`'s tensor."""
    module = call.module
    if module.dropout and module.training and module.num_layers > 1:
        registry.refuse_dropout()
    given = call.arguments
    dtype = accumulation_dtype(grad.dtype)
    inputs, kept = _steps(module, given["input"], dtype)
    states = [state.to(dtype) for state in tensors_in(given.get("hx"))]
    with torch.enable_grad():
        sweeps, *outputs = _run(module, inputs, kept, states)
        one = torch.cat([each.transpose(0, 1).flatten(1) for each in outputs], 1)
    wanted = [sweep.gates for sweep in sweeps]
    wanted += [each for sweep in sweeps for each in sweep.projected]
    found = iter(xla_replica.grad(one, wanted, grad.to(dtype)))
    gates = [next(found).detach() for _ in sweeps]
    contributions: dict[str, Contribution] = {}
    for sweep, delta in zip(sweeps, gates):
        of_state = delta
        if sweep.resets is not None:
            others, new = delta.split([2 * module.hidden_size, module.hidden_size], 2)
            of_state = torch.cat([others, new * sweep.resets], 2)
        for kind, left, right in (
            ("ih", delta, sweep.inputs),
            ("hh", of_state, sweep.before),
        ):
            contributions[f"weight_{kind}{sweep.suffix}"] = _outer(left, right)
            contributions[f"bias_{kind}{sweep.suffix}"] = Dense(left.sum(0))
        if sweep.projected:
            left = torch.stack([next(found) for _ in sweep.projected])
            right = torch.stack(sweep.unprojected)
            contributions[f"weight_hr{sweep.suffix}"] = _outer(left, right)
    return contributions


def _outer(left: torch.Tensor, right: torch.Tensor) -> Outer:
    left, right = left.detach(), right.detach()
    return Outer(left.transpose(0, 1).unsqueeze(1), right.transpose(0, 1).unsqueeze(1))


def _steps(
    module: rnn.RNNBase, inputs: torch.Tensor | PackedSequence, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns inputs ``(T, B, q)``, and which there are, ``(T, B, 1)``; None: all."""
    if isinstance(inputs, PackedSequence):
        padded, lengths = pad_packed_sequence(inputs)
        lengths = lengths.to(padded.device)
        places = torch.arange(len(padded), device=padded.device)
        return padded.to(dtype), (places[:, None] < lengths).unsqueeze(2)
    registry.require_batched(inputs, 3)
    inputs = inputs.transpose(0, 1) if module.batch_first else inputs
    return inputs.to(dtype), None


def _run(
    module: rnn.RNNBase,
    inputs: torch.Tensor,
    kept: torch.Tensor | None,
    states: list[torch.Tensor],
) -> tuple[Any, ...]:
    """Returns sweeps, the output ``(T, B, *)`` and last states ``(layers, B, *)``."""
    directions = ["", "_reverse"] if module.bidirectional else [""]
    sweeps: list[_Sweep] = []
    last: list[list[torch.Tensor]] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in directions:
            first = [state[len(sweeps)] for state in states]
            suffix = f"_l{layer}{direction}"
            weights = {
                name.removesuffix(suffix): value.detach().to(inputs.dtype)
                for name, value in module.named_parameters()
                if name.endswith(suffix)
            }
            # Backwards in time, from the last step.
            given = [
                x.flip(0) if direction and x is not None else x for x in (inputs, kept)
            ]
            sweep, output, state = _sweep(module, weights, suffix, *given, first)
            sweeps.append(sweep)
            outputs.append(output.flip(0) if direction else output)
            last.append(state)
        inputs = torch.cat(outputs, 2)
    return sweeps, inputs, *(torch.stack(each) for each in zip(*last))


def _sweep(
    module: rnn.RNNBase,
    weights: Mapping[str, torch.Tensor],
    suffix: str,
    inputs: torch.Tensor,
    kept: torch.Tensor | None,
    state: list[torch.Tensor],
) -> tuple[_Sweep, torch.Tensor, list[torch.Tensor]]:
    """Returns one sweep, its outputs ``(T, B, *)`` and its last state."""
    gates = F.linear(inputs, weights["weight_ih"], weights.get("bias_ih"))
    if not gates.requires_grad:
        gates.requires_grad_()
    if not state:
        sizes = [module.proj_size or module.hidden_size]
        sizes += [module.hidden_size] if module.mode == "LSTM" else []
        state = [inputs.new_zeros(inputs.shape[1], size) for size in sizes]
    before, outputs, resets, unprojected, projected = ([] for _ in range(5))
    for step, gate in enumerate(gates.unbind()):
        before.append(state[0])
        of_state = F.linear(state[0], weights["weight_hh"], weights.get("bias_hh"))
        if module.mode == "LSTM":
            enters, forgets, new, leaves = (gate + of_state).chunk(4, 1)
            cell = forgets.sigmoid() * state[1] + enters.sigmoid() * new.tanh()
            hidden = leaves.sigmoid() * cell.tanh()
            if "weight_hr" in weights:
                unprojected.append(hidden)
                hidden = F.linear(hidden, weights["weight_hr"])
                projected.append(hidden)
            after = [hidden, cell]
        elif module.mode == "GRU":
            size = [2 * module.hidden_size, module.hidden_size]
            (mixed, new), (mixed_state, new_state) = (
                each.split(size, 1) for each in (gate, of_state)
            )
            reset, update = (mixed + mixed_state).sigmoid().chunk(2, 1)
            resets.append(reset)
            new = (new + reset * new_state).tanh()
            after = [new + update * (state[0] - new)]
        else:
            total = gate + of_state
            after = [total.relu() if module.mode == "RNN_RELU" else total.tanh()]
        if kept is not None:  # a sequence that has ended keeps its state
            after = [torch.where(kept[step], a, b) for a, b in zip(after, state)]
        state = after
        outputs.append(state[0])
    output = torch.stack(outputs)
    if kept is not None:
        output = torch.where(kept, output, 0.0)
    found = torch.stack(resets).detach() if resets else None
    sweep = _Sweep(
        suffix, inputs, gates, torch.stack(before), found, unprojected, projected
    )
    return sweep, output, state
