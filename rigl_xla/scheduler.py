"""`RigLScheduler`: sparse training in two lines of a training loop."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import xla_replica
from rigl_xla import state
from rigl_xla.layers.options import INITIAL_WEIGHTS, Options
from rigl_xla.layers.sparse_layer import SparseLayer, check_hold, zero_inactive_
from rigl_xla.layers.weights import Selector
from rigl_xla.report.costs import Operations
from rigl_xla.report.report import Report, describe
from rigl_xla.topology.distribution import Distribution
from rigl_xla.topology.methods import Score
from rigl_xla.topology.update_schedule import UpdateSchedule
from rigl_xla.update.steps import DenseSums, TopologySteps
from rigl_xla.update.topology_update import state_of
from xla_replica import Replica
from xla_replica.backends.registry import given_or_current
from xla_replica.common.arguments import check_integer


def _of(name: str) -> property:
    """Returns a property that reads one of the options."""
    return property(operator.attrgetter(f"options.{name}"), doc=f"The option `{name}`.")


class RigLScheduler:
    """Keeps a model sparse while it trains, and moves its connections.

    Every ``delta`` steps before ``T_end`` the weakest connections of each layer are
    dropped and as many grown where the gradient is largest; see Evci et al. 2020,
    arXiv:1911.11134. Two lines::

        pruner = RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=75_000)
        ...
        loss.backward()
        if pruner():
            optimizer.step()

    The step that changes the topology updates no weights, as in the paper. With
    ``skip_step=False`` it does: the pruner then counts the optimizer's steps and need
    not be called, as inside wrappers that decide when to step.

    Hooks keep gradients of inactive connections zero from the backward pass on, so
    clipping and reductions see sparse ones, and inactive weights after every step.
    Gradients that are assigned to ``.grad`` by hand are collected and masked when the
    pruner is called; see `apply_mask_to_gradients`.

    **Replicas.** Masks are the same on all: random ones depend on the seed and the
    parameter's name alone, and gradients are summed over replicas before they are
    compared. That is one collective in the steps that an update collects, in which
    every replica must call the pruner. See `check_replicas`.

    **Copies.** A deep copy, or what was pickled and unpickled, comes with copies of the
    model and the optimizer and keeps those sparse: copy ``(model, optimizer, pruner)``
    together. A copy of the model alone is not kept sparse.

    **Devices.** Build it after the model was moved and the optimizer was built. The
    masks of a model that is moved later in place move too; one whose parameters are
    replaced (``.to('xla')``) is an error at the next call. An update reads nothing from
    the device and compiles nothing after the first.

    Args:
        model: The model, on its device.
        optimizer: Trains it; any torch optimizer, or a wrapper that is one.
        dense_allocation: Share of active weights, in (0, 1].
        T_end: Step from which on the topology stays, about 0.75 of all steps.
        sparsity_distribution: A key of `DISTRIBUTIONS`, or a function like them.
        ignore_linear_layers: Keep all but convolutions dense: linear, attention,
            recurrent and bilinear layers.
        delta: Steps between updates.
        alpha: Share of connections that the first update drops; shrinks to 0.
        static_topo: Never change the topology, whatever the method.
        grad_accumulation_n: Steps whose gradients score an update, 1 to ``delta``.
        state_dict: What `state_dict` returned, or rigl-torch 0.5.2's did; see
            `load_state_dict`.
        method: A key of `METHODS`.
        drop: Another score of active connections: a key of `SCORES`, or a function of
            a `Layer`. The lowest are dropped.
        grow: Another score of the others; the highest grow.
        structure: A pattern that masks keep: ``'N:M'``, such as ``'2:4'``, along input
            channels, or ``'constant-fan-in'``.
        initial_masks: ``'random'``, ``'magnitude'``, or scores by parameter name, of
            which the highest of each layer begin active.
        initial_weights: ``'rescale'`` (over the root of the layer's density) or
            ``'fan-in'`` (drawn anew, variance 2 / active inputs): without norms, very
            sparse networks need it. Default: the model's own.
        sparsities: Sparsities of single weights, by pattern of their names; 0 is
            dense. They are outside of the budget that the others share.
        include, exclude: Further weights that may be sparse, and weights to leave dense
            and out of the budget; see `weights_of`.
        dense_first: Keep the first weight dense; the first of the model, so none if
            that one is excluded. Default: for uniform distributions.
        annealing: How the drop fraction shrinks: a key of `ANNEALINGS`.
        momentum: How much of its running mean of gradients SNFS keeps at each step.
        skip_step: Whether a topology update replaces the optimizer's step. Must be
            False with wrappers that have ``steps_by_itself``.
        bound_new_steps: Whether connections that have just grown move no further under
            Adam and its kin than nine in ten others. False: their second moments begin
            at zero, as in rigl-torch, and they move about three learning rates.
        seed: The seed of initial masks and random growth.
        replica: Default: the one the caller runs in.

    Raises:
        ValueError, TypeError: An argument is not allowed, or does not fit the model.
            Nothing has been touched then.

    Warns:
        UserWarning: ``T_end`` is not past ``delta``: there will be no update; or the
            schedule is another one than that of ``state_dict``, which goes on; or the
            model is sparse already, and random masks drop connections that it has.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dense_allocation: float = Options.dense_allocation,
        T_end: int | None = Options.T_end,
        sparsity_distribution: str | Distribution = Options.sparsity_distribution,
        ignore_linear_layers: bool = Options.ignore_linear_layers,
        delta: int = Options.delta,
        alpha: float = Options.alpha,
        static_topo: bool = Options.static_topo,
        grad_accumulation_n: int = Options.grad_accumulation_n,
        state_dict: Mapping[str, Any] | None = None,
        *,
        method: str = Options.method,
        drop: str | Score | None = Options.drop,
        grow: str | Score | None = Options.grow,
        structure: str | None = Options.structure,
        initial_masks: str | Mapping[str, torch.Tensor] = Options.initial_masks,
        initial_weights: str | None = Options.initial_weights,
        sparsities: Mapping[str, float] | None = Options.sparsities,
        include: Selector | Iterable[Selector] = Options.include,
        exclude: Selector | Iterable[Selector] = Options.exclude,
        dense_first: bool | None = Options.dense_first,
        annealing: str = Options.annealing,
        momentum: float = Options.momentum,
        skip_step: bool = Options.skip_step,
        bound_new_steps: bool = Options.bound_new_steps,
        seed: int = Options.seed,
        replica: Replica | None = None,
    ) -> None:
        arguments = locals()
        names = [field.name for field in dataclasses.fields(Options)]
        given = {name: arguments[name] for name in names if name in arguments}
        self.options = options = Options(**given)
        self.model, self.optimizer = model, optimizer
        self.replica = given_or_current(replica)
        self._closed = True  # until `_adopt`
        if state_dict is not None:
            self._restore(state_dict, {})
            return
        weights, layers = options.layers_of(model)
        options.check_schedule(stacklevel=2)
        check_hold(layers, optimizer, skip_step, self)
        options.warn_of_lost_connections(layers, self.replica, stacklevel=2)
        self._adopt(TopologySteps(weights, layers, options))
        if initial_weights is not None:
            for layer in layers:
                layer.data.copy_(INITIAL_WEIGHTS[initial_weights](layer, seed))
            self.apply_mask_to_weights()

    # --- the training loop's calls --------------------------------------------------

    def __call__(self) -> bool:
        """Ends a step; call it once after the backward passes of each.

        Returns:
            Whether to step the optimizer: False if the topology was changed instead.
            Always True with ``skip_step=False``, and after `close`.

        Raises:
            ValueError: The model's parameters were replaced.
            RuntimeError: An update is due, but there was no gradient to make it from.
        """
        if self._closed:
            return True
        for layer in self._layers:
            layer.check_bound()
        self._steps.end_backward()
        self._steps.collect_assigned(self.replica)
        if not self.options.skip_step:
            return True
        return not self._steps.end(self.optimizer, self.replica)

    def close(self) -> None:
        """Lets go of model and optimizer, which stay as they are; may be repeated."""
        if not self._closed:
            self._closed = True
            for part in (*self._handles, *self._layers):
                part.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has in common: no hooks, and no bond to this process."""
        bound = ("replica", "_handles", "_exact")
        return {name: value for name, value in vars(self).items() if name not in bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Places the hooks on the model that was copied, or unpickled, with it."""
        vars(self).update(state)
        if "replica" not in state:
            self.replica = xla_replica.current()
        if not self._closed:
            check_hold(self._layers, self.optimizer, self.options.skip_step, self)
            self._place_hooks()

    def __deepcopy__(self, memo: dict[int, Any]) -> RigLScheduler:
        """Returns a pruner of copies of the model and the optimizer."""
        copied = memo[id(self)] = object.__new__(type(self))
        state = copy.deepcopy(self.__getstate__(), memo)
        copied.__setstate__({**state, "replica": self.replica})
        return copied

    def __enter__(self) -> RigLScheduler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- what can be asked ----------------------------------------------------------

    @property
    def schedule(self) -> UpdateSchedule:
        """When the topology changes and by how much: a part of the options."""
        return self.options

    @property
    def collects(self) -> bool:
        """Whether an update uses the dense gradients of the step under way."""
        return self._steps.collects

    @property
    def masks(self) -> dict[str, torch.Tensor]:
        """The live masks by parameter name: bool, True where active."""
        return {layer.name: layer.mask for layer in self._layers}

    def report(
        self, operations: Operations | None = None, num_steps: int | None = None
    ) -> Report:
        """Returns sparsity, churn, exploration and costs at this moment.

        Reads nothing; the device is read, once, when a value is asked for.

        Args:
            operations: The result of `operations_of`, for costs.
            num_steps: Steps of the whole run, which gradual pruning is charged by.

        Raises:
            ValueError: The operations are of another model.
        """
        return Report(self, operations, num_steps)

    def __str__(self) -> str:
        return describe(self)

    def check_replicas(self) -> None:
        """Compares masks and sparse weights of all replicas; reads the device.

        Collective. Every replica copies them to its host and only hashes travel, which
        is cheap enough for once an epoch. A NaN that all replicas have does not count
        as a difference, and nothing but masks and sparse weights is compared.

        Raises:
            ReplicaError: They differ.
        """
        self._steps.check_replicas(self.replica)

    # --- the attributes and methods of rigl-torch ------------------------------------

    T_end = _of("T_end")
    delta_T = _of("delta")
    alpha = _of("alpha")
    grad_accumulation_n = _of("grad_accumulation_n")
    dense_allocation = _of("dense_allocation")
    sparsity_distribution = _of("sparsity_distribution")
    ignore_linear_layers = _of("ignore_linear_layers")
    static_topo = _of("static_topo")

    @property
    def step(self) -> int:
        """The number of the last step."""
        return self._steps.number

    @step.setter
    def step(self, number: int) -> None:
        self._steps.number = check_integer("step", number, least=0)

    @property
    def rigl_steps(self) -> int:
        """How many updates of the topology there were."""
        return self._steps.num_updates

    @property
    def W(self) -> list[nn.Parameter]:
        """All weights that can be sparse, dense ones too, in order of registration."""
        return [weight.parameter for weight in self._steps.weights]

    @property
    def N(self) -> list[int]:
        """Number of weights in each of `W`."""
        return [parameter.numel() for parameter in self.W]

    @property
    def S(self) -> list[float]:
        """Sparsity of each of `W`."""
        sparsities = {layer.name: layer.sparsity for layer in self._layers}
        return [sparsities.get(weight.name, 0.0) for weight in self._steps.weights]

    @property
    def backward_masks(self) -> list[torch.Tensor | None]:
        """Mask of each of `W`; None where it is dense."""
        masks = {layer.name: layer.mask for layer in self._layers}
        return [masks.get(weight.name) for weight in self._steps.weights]

    def cosine_annealing(self) -> float:
        """Returns the drop fraction of an update at this step."""
        return self.schedule.drop_fraction(self.step)

    @torch.no_grad()
    def apply_mask_to_weights(self) -> None:
        """Zeroes inactive weights; done after every optimizer step anyway."""
        for layer in self._layers:
            layer.mask_()

    @torch.no_grad()
    def apply_mask_to_gradients(self) -> None:
        """Zeroes gradients of inactive weights, as the backward pass does anyway.

        For gradients that are assigned by hand, before somebody clips them: what an
        update needs of them is collected first.
        """
        self._steps.collect_assigned(self.replica)
        for layer in self._layers:
            gradient = layer.weight.parameter.grad
            if gradient is not None and layer.hooked:
                zero_inactive_(gradient.detach(), layer.mask)

    @torch.no_grad()
    def reset_momentum(self) -> None:
        """Zeroes what the optimizer keeps for inactive weights."""
        for layer in self._layers:
            for _, tensor in state_of(layer.weight.parameter, self.optimizer):
                layer.follow(tensor.device)
                zero_inactive_(tensor, layer.mask)

    # --- what is saved --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns steps, schedule, masks (one bit per weight) and collected gradients.

        Plain types and copies on the CPU, for any number of replicas; loads with
        ``weights_only=True``. Call it between steps, not after a backward pass.
        """
        return state.to_dict(self._steps, self.replica)

    def load_state_dict(self, state_dict: Mapping[str, Any], **changes: Any) -> None:
        """Loads what `state_dict` returned, or rigl-torch 0.5.2's did.

        Steps, masks and schedule are the saved ones, and so are the options that a
        state holds where this pruner has the default, such as ``method``, ``seed`` and
        ``dense_allocation``; functions, known by name, have to be given again. Weights
        are masked at once.

        Args:
            state_dict: The saved state.
            changes: Values that replace saved ones: ``T_end``, ``delta``, ``alpha``,
                ``grad_accumulation_n``, ``annealing``.

        Raises:
            ValueError, TypeError: It is not such a state, or does not fit the model or
                this pruner's options. Nothing has changed then.

        Warns:
            UserWarning: This pruner's schedule is another one than the saved.
        """
        self._restore(state_dict, changes)

    # --- how ------------------------------------------------------------------------

    def _restore(self, saved: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        """Replaces the pruner's state by a saved one, in which values may change."""
        steps = state.from_dict(saved, self, changes, stacklevel=4)
        steps.options.check_schedule(stacklevel=3)
        check_hold(steps.layers, self.optimizer, steps.options.skip_step, self)
        self._adopt(steps)

    def _adopt(self, steps: TopologySteps) -> None:
        """Replaces the pruner's state, and keeps the model sparse by its masks."""
        self.close()
        self._closed = False
        self._steps, self._layers, self.options = steps, steps.layers, steps.options
        if not steps.is_collecting:
            steps.discard_gradients(self.replica)
        self._place_hooks()
        self.apply_mask_to_weights()
        self.reset_momentum()

    def _place_hooks(self) -> None:
        """Registers hooks on weights, which keep no pruner alive, and the optimizer."""
        for layer in self._layers:
            layer.hold(self)
        # A pruner that counts the optimizer's steps lives as long as that.
        hook: Callable[..., None] = self._after_step
        if self.options.skip_step:
            hook = functools.partial(_mask_weights, self._layers)
        self._handles: list[Any] = []
        if self._layers:
            self._handles.append(self.optimizer.register_step_post_hook(hook))
        # Dense gradients are added as the optimizer adds others, if its sums are exact.
        self._exact = exact = getattr(self.optimizer, "repeatable", None)
        if exact and self.options.method_in_use.collects != "never":
            self._handles.append(DenseSums(self._steps, exact, self.replica))

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Masks weights and ends the step, for ``skip_step=False``."""
        self.apply_mask_to_weights()
        for layer in self._layers:
            layer.check_bound()
        if getattr(optimizer, "repeatable", None) is not self._exact:
            raise RuntimeError(
                "the optimizer was wrapped, or wrapped again, after this pruner was "
                "built, so that exact= is another one: build the pruner later"
            )
        if self._steps.collects:
            if self.replica.num_replicas > 1 and not self._exact:
                # A replica without a minibatch looks for what was assigned, too: in a
                # program of its own, not in the one with the optimizer's collective.
                self.replica.sync()
            self._steps.collect_assigned(self.replica)
        self._steps.end(self.optimizer, self.replica)


@torch.no_grad()
def _mask_weights(layers: Sequence[SparseLayer], *_: object) -> None:
    """Masks weights after the optimizer's step, also where the pruner is gone."""
    for layer in layers:
        if layer.hooks:  # or another pruner's layer is in its place
            layer.mask_()
    if pruner := layers[0].pruner:
        pruner._steps.note_optimizer_step()
