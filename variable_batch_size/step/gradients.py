"""Gradients that stay allocated: accumulated, summed over replicas, zeroed in place.

Kept tensors make one graph of every minibatch and one of every update: a gradient that
is None at first and a tensor later would trace two of each, and a replica without
gradients would bring an empty list to the collective.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from variable_batch_size.data.account import Account
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.step.run import Run
from xla_replica import AccumulationNote
from xla_replica.backends.gradient_sum import GradientSum, Pass
from xla_replica.device.gradients import accumulation_hook, weak_hook

Modules = Mapping[str, nn.Module]

_KEPT_OUT = (
    "What another network's loss shall not add is kept out by requires_grad_(False), "
    "or by backward(inputs=[*network.parameters()])"
)
_LOST = (
    "gradients were overwritten, and this step's first {} minibatches would be lost: "
    "remove model.zero_grad() from the training loop; the optimizer zeroes gradients "
    f"itself. {_KEPT_OUT}"
)
# Sums of many numbers of these dtypes lose most of what the last ones add.
_NARROW = (torch.bfloat16, torch.float16)
# How many numbers of a gradient are compared where reading is free.
_NUM_COMPARED = 8


class StepGradients:
    """The ``.grad`` of every trainable parameter.

    Construction is collective: parameters are made equal to those of replica 0.

    Attributes:
        sums: What holds the gradients, and sums them over replicas.
        trained: A checksum of which parameters are trained.
        on_change: Called when others are, before gradients are held for these.
    """

    on_change: Callable[[], object] = tuple
    # Whether a replica that is idle must zero sums, so that tensors are of the age that
    # others' have.
    is_aged = False

    def __init__(self, run: Run) -> None:
        self._run, self._is_lazy = run, run.replica.is_lazy
        # Ids of all parameters when gradients were last allocated, and whether each
        # required one: to hash or to compare parameters takes longer.
        self._allocated_for: list[tuple[int, bool]] = []
        self._records: dict[nn.Parameter, GradientRecord] = {}
        self._nodes: dict[nn.Parameter, tuple[Any, Any]] = {}
        self._adds_up_widely = run.float32_sums and not run.sharded
        self._open: list[GradientRecord] = []  # of the pass under way, or that raised
        self.sums = self.make_sum()
        self.add(run.parameters())

    def make_sum(self) -> GradientSum:
        """Returns what holds the gradients."""
        run = self._run
        how = run.overlap, run.parameters(), run.shard_gradients
        return run.replica.gradient_sum(self._is_unchanged, *how)

    # --- which parameters are trained -----------------------------------------------

    def add(self, parameters: list[nn.Parameter]) -> None:
        """Makes new parameters those of replica 0, and allocates their gradients."""
        replica = self._run.replica
        for parameter in parameters:
            parameter.grad = None  # of a backward pass before this optimizer's time
        replica.sync()  # keeps what replicas have pending out of the collective
        replica.broadcast_([parameter.detach() for parameter in parameters])
        self._allocate(after_backward=False)

    def refresh(self, after_backward: bool = False) -> None:
        """Follows ``requires_grad``: allocates the unfrozen, drops the frozen.

        Must find the same on every replica; cheap when nothing has changed.

        Args:
            after_backward: Whether ``.grad`` holds the gradients of a minibatch. Those
                of new parameters then count, else they are dropped.
        """
        if self._is_unchanged():
            return
        if not {*dict(self._allocated_for)}.issuperset(map(id, self._run.parameters())):
            raise ValueError(
                "a parameter group must be added through the wrapper's add_param_group"
            )
        self._allocate(after_backward)

    def _is_unchanged(self) -> bool:
        """Returns whether the parameters that are trained are those allocated for.

        Asked several times a step.
        """
        groups = self._run.inner.param_groups
        now = [(id(p), p.requires_grad) for group in groups for p in group["params"]]
        return now == self._allocated_for

    def refuse_changes(self) -> None:
        """Raises ValueError if other parameters are trained than in the step so far."""
        if not self._is_unchanged():
            raise ValueError(
                "requires_grad changed within a step: change it in an attached "
                "function or between epochs, or set it back before step()"
            )

    def _allocate(self, after_backward: bool) -> None:
        run, gradients = self._run, self.sums.gradients
        parameters = run.parameters()
        self._allocated_for = [(id(p), p.requires_grad) for p in parameters]
        trained = [p for p in parameters if p.requires_grad]
        self.trained = zlib.crc32(bytes(p.requires_grad for p in parameters))
        self.on_change()
        new = {p for p in trained if after_backward and p not in gradients}
        for p in parameters:
            if p.requires_grad != (p in gradients) and p not in new:
                p.grad = None
        self.sums.hold(trained)
        # Of gradients of 16 bits, what the minibatches of the step have added up to.
        self._wide = {
            parameter: torch.zeros_like(gradient, dtype=torch.float32)
            for parameter, gradient in self.sums.gradients.items()
            if self._adds_up_widely and gradient.dtype in _NARROW
        }
        self._watch(new)
        run.replica.sync()  # zeros on the device, not in the first graph
        if run.noise:
            run.noise.watch(run.inner.param_groups, after_backward)

    def _watch(self, new: set[nn.Parameter]) -> None:
        """Records what is written to the gradients that are held, and to no others.

        Args:
            new: Parameters whose ``.grad`` holds that of a minibatch already.
        """
        gradients = self.sums.gradients
        for parameter in [p for p in self._records if p not in gradients]:
            self._nodes.pop(parameter)[1].remove()
            del self._records[parameter]
        for parameter, gradient in gradients.items():
            if type(gradient) is not torch.Tensor:
                continue  # a sharded one is written part by part
            record = self._records.get(parameter)
            if record is None:
                record = self._records[parameter] = GradientRecord()
                record.start(gradient, is_none=parameter.grad is None)
                record.accumulated = parameter in new
                hook = weak_hook(self._before_accumulation, record)
                note = AccumulationNote(record.note)
                handle = parameter.register_post_accumulate_grad_hook(note)
                self._nodes[parameter] = accumulation_hook(parameter, hook), handle
            elif parameter.grad is gradient:  # not thrown away, perhaps moved
                record.look(gradient)

    def _before_accumulation(self, record: GradientRecord, gradient: Any) -> None:
        """Runs right before autograd adds to a gradient, or replaces it."""
        self._open.append(record)
        if len(self._open) == 1:  # a pass begins
            for each in self._records.values():
                each.begin_pass()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        record.overwritten |= record.is_other
        record.accumulated, record.gradient = True, None

    def _end_pass(self) -> None:
        """Runs after a backward pass."""
        for record in self._open:
            record.end_pass()
        self._open.clear()

    # --- a minibatch ----------------------------------------------------------------

    def prepare_backward(self, account: Account) -> None:
        """Tells the sum and the meter which minibatch the next backward pass is."""
        run, step, substep = self._run, account.now, account.substep
        self._is_last = step is not None and substep == step.num_substeps - 1
        if self._wide and self._is_last and substep and not self._is_lazy:
            self.narrow()  # the last pass adds its own, and may begin the sum
        divisor = step.num_minibatches if step and run.reduction == "mean" else None
        counts = not (account.plan.padded and account.is_padding)
        self.sums.prepare_backward(Pass(substep == 0, self._is_last, divisor, counts))
        self.start_records()

    def start_records(self) -> None:
        """Records gradients as they are now, the baseline of the next minibatch."""
        self._open, gradients = [], self.sums.gradients
        for parameter, record in self._records.items():
            record.start(gradients[parameter], parameter.grad is None)

    def check(self, num_accumulated: int, needs_backward: bool) -> None:
        """Checks what a minibatch's backward pass has left in ``.grad``.

        Args:
            num_accumulated: Minibatches that the step has accumulated before.
            needs_backward: Whether a minibatch without any gradient is an error.
        """
        if not self._is_unchanged():
            if num_accumulated:
                self.refuse_changes()
            self.refresh(after_backward=True)
        if self._open:
            raise ValueError("backward() has raised: let its error end the epoch")
        problem, found = "", self.sums.has_new
        if found is None:  # the records decide, unless some gradients have none
            found = len(self._records) < len(self.sums.gradients) or not self._records
        for parameter, record in self._records.items():
            gradient = parameter.grad
            written = record.is_written(gradient)
            if not written and record.has_other_numbers():
                written = not self.sums.has_begun(parameter)  # which changes them too
            found |= record.accumulated or written
            if record.accumulated and written and gradient is not None:
                problem = (
                    f"a gradient of shape {tuple(parameter.shape)} was changed between "
                    "backward() and step(): clip by max_grad_norm=, or change it in a "
                    "hook of optimizer.register_step_pre_hook: "
                    "docs/gradients.md#gradients-inside-the-loop"
                )
            elif record.overwritten and num_accumulated:
                problem = _LOST.format(num_accumulated)
        if needs_backward and not found:
            problem = (
                "step() without backward(): call loss.backward() before every step(), "
                "and build the optimizer after load_state_dict(..., assign=True)"
            )
        if problem:
            self._run.replica.check_parameters(self._run.parameters())  # wrapped since
            raise ValueError(problem)

    def refuse_zeroing(self) -> None:
        """Raises ValueError if a backward pass has added to gradients since `step`."""
        if any(record.accumulated for record in self._records.values()):
            raise ValueError(
                "zero_grad() between backward() and step() takes nothing away: every "
                f"minibatch counts, and updates zero gradients. {_KEPT_OUT}"
            )

    def accept(self, num_accumulated: int) -> None:
        """Adds a minibatch's gradients to those of the step, after `check`.

        Puts the kept ones back where ``model.zero_grad()`` took them away.
        """
        for parameter, gradient in self.sums.gradients.items():
            if parameter.grad is gradient:
                continue
            if self.sums.has_begun(parameter):
                raise ValueError(
                    "a gradient was replaced after backward(), while it is summed over "
                    "replicas: change it in a step hook, or pass overlap=False"
                )
            if num_accumulated and not self.sums.accumulates_elsewhere(parameter):
                raise ValueError(_LOST.format(num_accumulated))
            found, parameter.grad = parameter.grad, gradient
            with torch.no_grad():  # None: thrown away, and no part of this minibatch
                gradient.zero_() if found is None else gradient.copy_(found)
        if self._wide and (self._is_lazy or not self._is_last):
            self._widen()

    def _widen(self) -> None:
        """Moves what a minibatch has added to gradients of 16 bits to float32 sums.

        Through ``.data``: whoever counts writes to ``.grad``, as RigL does, would take
        them for a `zero_grad` that throws gradients away.
        """
        for parameter, wide in self._wide.items():
            gradient = self.sums.gradients[parameter].data
            wide.add_(gradient)
            gradient.zero_()

    def narrow(self) -> None:
        """Moves float32 sums back to the gradients; on a lazy device before the sum."""
        for parameter, wide in self._wide.items():
            gradient = self.sums.gradients[parameter]
            gradient.data.copy_(wide)
            wide.zero_()
            self._records[parameter].look(gradient)

    # --- an update ------------------------------------------------------------------

    def refuse_nonzero(self) -> None:
        """Raises ValueError unless the sums of a step that weighs nothing are zero."""
        gradients = self.sums.gradients.values()
        if any(type(g) is torch.Tensor and g.count_nonzero() for g in gradients):
            raise ValueError(
                "the step's weights sum to zero, but its gradient is not zero: "
                "step(weight=...) needs the number of tokens that the loss sums"
            )

    def clear(self) -> None:
        """Zeroes the gradients, and forgets what was measured of the step."""
        self.sums.clear()
        for wide in self._wide.values():
            wide.zero_()


class GradientRecord:
    """Notices whether autograd or somebody else has written to a gradient.

    Between the minibatches of a step ``.grad`` holds a partial sum. Clipping it there,
    or zeroing it, makes a wrong mean without a word. torch counts the writes to every
    tensor (``tensor._version``), on every kind of device and without work there. By how
    much an accumulation moves the count is the device's matter, so it is read before a
    backward pass adds to any gradient, and right after each accumulation: what has
    moved it otherwise is another writer. A write through ``.data`` is not counted. On
    the host, where reading is free, a few numbers of the gradient are compared too,
    which shows it. They are read before the pass and after it, since code of Python
    takes several times as long between passes over memory.

    Gradients that no backward pass has added to since the last `step` may be written by
    hand in any way; they are somebody's own gradients.

    It holds no parameter, so that a hook keeps nothing alive; and no gradient while it
    is accumulated, since a sum takes the numbers elsewhere and frees it.

    Attributes:
        accumulated: Whether autograd has added to it since `start`.
        overwritten: Whether somebody else had written to it before.
        gradient: The gradient; None while it is accumulated.
        is_other: Whether somebody else had written to it when the pass began.
    """

    _layout: Any = None  # in which the numbers of `_few` are the middle ones

    def start(self, gradient: Any, is_none: bool) -> None:
        """Starts a minibatch with a kept gradient, which ``.grad`` may not hold yet."""
        self._was_none = is_none
        self.accumulated = self.overwritten = False
        self.gradient, self._version = gradient, gradient._version
        self._numbers = None if is_none else self._some_numbers()  # nobody has it

    def look(self, gradient: Any) -> None:
        """Records the gradient as it is now."""
        self.gradient, self._version = gradient, gradient._version
        self._numbers = self._some_numbers()

    def begin_pass(self) -> None:
        """Runs before a backward pass adds to any gradient."""
        # Later in a minibatch its sum over replicas may be running.
        is_other = not self.accumulated and self.has_other_numbers()
        self.is_other = is_other or self.gradient._version != self._version

    def note(self, parameter: torch.Tensor) -> None:
        """Runs right after autograd has added to the gradient, or replaced it."""
        self.gradient: Any = parameter.grad
        self._version = self.gradient._version

    def end_pass(self) -> None:
        """Runs after a backward pass that has accumulated the gradient."""
        self._numbers = self._some_numbers()

    def is_written(self, gradient: torch.Tensor | None) -> bool:
        """Returns whether ``.grad`` is another tensor than recorded, or written to."""
        if gradient is None and self._was_none and not self.accumulated:
            return False
        return gradient is not self.gradient or gradient._version != self._version

    def has_other_numbers(self) -> bool:
        """Returns whether the recorded gradient has other numbers; False if unread."""
        return self._numbers is not None and self._numbers != self._some_numbers()

    def _some_numbers(self) -> bytes | None:
        """Returns a few numbers from the middle of the gradient as bytes.

        So NaN equals itself. None where reading is not free. From its memory, since
        torch's operations take ten times as long, a few times a minibatch for every
        parameter.
        """
        held = self.gradient
        if not (held.is_cpu and held.layout is torch.strided and held.data_ptr()):
            return None  # or its memory was given back
        layout = held.data_ptr(), held.stride()
        if layout != self._layout:
            self._layout, size = layout, held.element_size()
            extent = 1 + sum((n - 1) * s for n, s in zip(held.shape, layout[1]))
            number = min(_NUM_COMPARED, extent - extent // 2)
            self._few = layout[0] + extent // 2 * size, number * size
        return ctypes.string_at(*self._few)


class Sums:
    """Sums in floating point, whose last bits depend on the order of minibatches.

    `variable_batch_size.live.exact.ExactModel` has the same bits in any order.

    `variable_batch_size.live.repeatable.RepeatableSums` is for members of live runs.

    Attributes:
        gradients: What accumulates the gradients of a step, given a `Run`.
        is_exact: Whether sums have the same bits in any order.
        keeps_buffers: Whether a step may be run again by others, so that buffers are
            equal on all replicas after every update.
    """

    gradients: type[StepGradients] = StepGradients
    is_exact = keeps_buffers = False

    def check(self, parameters: list[nn.Parameter], schedule: Schedule) -> None:
        """Raises ValueError unless these parameters' gradients can be added."""

    def environment(self) -> dict[str, Any]:
        """Returns what the bits of a gradient depend on beside the model."""
        return {}

    def account(self, sampler: CustomSampler, key: int) -> Account:
        """Returns the account of an optimizer with these sums."""
        return Account(sampler.ledger, key)

    def state_dict(self) -> dict[str, int] | None:
        """Returns what sums go on from after a step; None: they begin from nothing."""
        return None

    def meet(self, state: dict[str, int] | None) -> None:
        """Takes the state of a run that is resumed, or of other members."""
