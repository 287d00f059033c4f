"""Functions of torch, told to who follows the tensors that they take.

A mode of torch sees every function, which takes a large part of a small model's forward
pass. Here only functions are seen that take one of some tensors: these are of another
class for a while, as torch's lazy parameters are until they know their shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class Follower(Protocol):
    """Takes the functions that are called with tensors that are followed."""

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the function, or `Following.run`, and returns what that returns."""


class Following:
    """Follows tensors for one follower, from one call of `start` to that of `stop`.

    Followers in one thread may be nested: each is told of all that any of them follows.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._outer: Following | None = None
        self._changed: list[torch.Tensor] = []

    def start(self) -> None:
        """Lets the follower be told of the functions of this thread."""
        self._outer = getattr(_THREAD, "following", None)
        _THREAD.following = self

    def stop(self) -> None:
        """Ends that; tensors are of their own classes again."""
        _THREAD.following = self._outer
        if self._outer is not None:
            self._outer._changed += self._changed
        else:
            for tensor in self._changed:
                tensor.__class__ = _ORIGINAL[type(tensor)]
        self._changed = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Follows tensors; those of classes by others are left as they are."""
        for tensor in tensors:
            followed = _FOLLOWED.get(type(tensor))
            if followed is not None:
                tensor.__class__ = followed
                self._changed.append(tensor)

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function, of which the next follower is told."""
        if self._outer is None:
            return function(*args, **kwargs)
        return self._outer._follower.run(function, args, kwargs)


_THREAD = threading.local()


def _told(
    cls: type,
    function: Callable[..., Any],
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    following: Following | None = getattr(_THREAD, "following", None)
    with torch._C.DisableTorchFunctionSubclass():
        if following is None:
            return function(*args, **kwargs or {})
        return following._follower.run(function, args, kwargs or {})


class _FollowedTensor(torch.Tensor):
    __torch_function__ = classmethod(_told)


class _FollowedParameter(nn.Parameter):
    __torch_function__ = classmethod(_told)


_FOLLOWED: dict[type, type] = {
    torch.Tensor: _FollowedTensor, nn.Parameter: _FollowedParameter,
}  # fmt: skip
_ORIGINAL = {followed: own for own, followed in _FOLLOWED.items()}
# Classes of tensors about which nothing is special.
ORDINARY = frozenset((*_FOLLOWED, *_ORIGINAL))
