"""Modules that torch.compile has compiled, run as they were written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Makes compiled modules run as they were written, inside the block.

    What was compiled before does not run hooks. These are ``model`` and modules in it
    that ``torch.compile(module)`` or ``module.compile()`` returned or changed; compiled
    functions that call them are out of reach.
    """
    with contextlib.ExitStack() as restoring:
        for module in model.modules():
            own = vars(module)
            if "dynamo_ctx" in own:  # torch.compile's wrapper of a module
                restoring.callback(setattr, module, "forward", module.forward)
                module.forward = module._orig_mod.__call__
            elif (compiled := own.get("_compiled_call_impl")) is not None:
                restoring.callback(setattr, module, "_compiled_call_impl", compiled)
                module._compiled_call_impl = None
        yield
