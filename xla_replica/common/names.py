"""Names of parameters, whatever wraps the model."""

from __future__ import annotations

# What torch.compile, FSDP and checkpointing put into a path, wherever they wrap.
_INNER = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_OUTER = "module."  # DDP and DataParallel, around the whole model


def unwrapped(name: str) -> str:
    """Returns a parameter's name without what wrappers put into it.

    >>> unwrapped("module._orig_mod.blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    name = ".".join(part for part in name.split(".") if part not in _INNER)
    while name.startswith(_OUTER):
        name = name.removeprefix(_OUTER)
    return name
