"""What computes a value, written down: source text, versions, tensors and attributes.

A description maps the path of every part, such as ``loss.label_smoothing``, to a short
text that another process writes too. Code of installed packages is described by its
name and the package's version; other code by its source text without comments, and by
its defaults, closures and the globals whose names it loads.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import dis
import functools
import hashlib
import importlib.metadata
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xla_replica import Replica

_PLAIN: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, range)
_PLAIN += (type(...), torch.dtype, torch.layout, torch.memory_format)
_CODE = (types.FunctionType, types.ModuleType, types.BuiltinFunctionType, type)
_LONG_TEXT = 80
# A list, object or function of more parts than that is one line of a description.
_MANY_PARTS = 256
_OWN_PACKAGES = ("per_sample_grad", "xla_replica")
_HOOKS = [name for name in vars(nn.Module()) if name.endswith("ward_hooks")]
_HOOKS += ["_forward_pre_hooks", "_backward_pre_hooks"]
# Attributes that compute nothing: those of every module, Lightning's trainer, and what
# transformers notes in objects, such as which warnings were shown.
_NOT_VALUES = {*vars(nn.Module()), "_trainer", "_fabric", "_original_object_hash"}
_NOT_VALUES |= {"deprecation_warnings", "warnings_issued"}


def fingerprint(values: Mapping[str, Any], tag: str | None = None) -> dict[str, str]:
    """Returns texts by path that differ where the values would compute otherwise.

    Args:
        values: What to describe, by name; names begin the paths.
        tag: Stands for what cannot be described, such as an open file or a function
            without source text; None: they are an error.

    Raises:
        TypeError: A part cannot be described, and there is no ``tag``; the message
            names its path.

    >>> fingerprint({"loss": functools.partial(max, 3)})["loss.args[0]"]
    '3'
    """
    found = {"version of torch": str(torch.__version__)}
    seen: dict[int, tuple[str, Any]] = {}  # with the values, so that ids stay theirs
    for name, value in values.items():
        _describe(name, value, tag, found, seen)
    return found


def digest(data: Any) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a text, or of bytes in a buffer.

    >>> digest("a") == digest(b"a")
    True
    """
    content = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(content).hexdigest()[:16]


def _describe(path: str, value: Any, tag: str | None, found: Any, seen: Any) -> None:
    """Adds the texts of a value and of its parts to ``found``."""
    if id(value) in seen:  # a circle, or a module in two places
        found[path] = f"see {seen[id(value)][0]}"
        return
    try:
        text, parts = _read(value)
    except Exception as error:
        if tag is None:
            raise TypeError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__}, of "
                "which nobody can tell whether it computes the same in another run "
                f"({error}). Pass tag=, a text of your own that stands for it: change "
                "the text whenever this value changes"
            ) from error
        text, parts = f"a {type(value).__qualname__}", {}
    # Whether two tuples of a program are one object is up to Python.
    if parts and not isinstance(value, tuple):
        seen[id(value)] = path, value
    if len(text) > _LONG_TEXT:
        text = f"{text[: _LONG_TEXT // 2]}... {digest(text)}"
    inner = {path: text}
    for name, part in parts.items():
        _describe(path + name, part, tag, inner, seen)
    if len(inner) > _MANY_PARTS and not isinstance(value, nn.Module):
        inner = {path: f"{len(inner)} parts {digest(repr(inner))}"}
    found.update(inner)


def _read(value: Any) -> tuple[str, dict[str, Any]]:
    """Returns a text that tells a value from others of its kind, and its parts."""
    kind = type(value).__qualname__
    is_annotation = type(value).__module__ == "typing"  # such as a TypeVar of a class
    if isinstance(value, _PLAIN) or is_annotation:
        return repr(value), {}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        host = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} {digest(host.numpy())}", {}
    if isinstance(value, torch.device | Replica):
        return getattr(value, "type", "replica"), {}  # which one is up to the run
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if type(value) in (list, tuple):
        return f"{kind} of {len(value)}", {f"[{n}]": x for n, x in enumerate(value)}
    if type(value) is dict and all(isinstance(key, _PLAIN) for key in value):
        parts = {f"[{key!r}]": item for key, item in value.items()}
        return f"dict of {', '.join(parts)}", parts
    if isinstance(value, functools.partial):
        return kind, {f".{n}": getattr(value, n) for n in ("func", "args", "keywords")}
    if isinstance(value, types.MethodType):
        return kind, {".__self__": value.__self__, ".__func__": value.__func__}
    if isinstance(value, _CODE):
        return _read_code(value)
    return kind, _parts_of(value)


def _read_code(value: Any) -> tuple[str, dict[str, Any]]:
    """Reads a function, class or module: name and version, or source and variables."""
    module = str(getattr(value, "__module__", value.__name__))
    name = getattr(value, "__qualname__", "")
    version = _version(module.partition(".")[0])
    if version is not None and "<locals>" not in name:
        return f"{module}.{name} {version}".replace(". ", " ").rstrip(), {}
    if isinstance(value, type):
        return f"class {name}", _parts_of_class(value)
    text = textwrap.dedent(inspect.getsource(value))
    with contextlib.suppress(SyntaxError):  # a lambda's line may be half a call
        text = ast.unparse(ast.parse(text))  # which has no comments
    if name.endswith("<lambda>") and text.count("lambda") > 1:  # which of its line?
        code = value.__code__
        text += f"{code.co_code.hex()} {code.co_names} {_plain(code.co_consts)}"
    return f"source {digest(text)}", _variables(value)


@functools.cache
def _version(package: str) -> str | None:
    """Returns the version of an installed package; None: its code has none.

    That of this project is empty: what computes other numbers has another format.
    """
    if package in _OWN_PACKAGES:
        return ""
    path = Path(getattr(sys.modules.get(package), "__file__", None) or os.__file__)
    if {"site-packages", "dist-packages"} & set(path.parts):
        names = importlib.metadata.packages_distributions().get(package, ())
        return " ".join(map(importlib.metadata.version, names)) or None
    is_python = path.is_relative_to(Path(os.__file__).parent)
    is_python = is_python and package in sys.stdlib_module_names
    return "of Python {}.{}".format(*sys.version_info) if is_python else None


def _variables(function: Any) -> dict[str, Any]:
    """Returns the defaults, closure and globals that a function computes with."""
    if not inspect.isfunction(function):
        return {}
    known, names = function.__globals__, sorted(_globals_of(function.__code__))
    found = {name: known[name] for name in names if name in known}
    found |= inspect.getclosurevars(function).nonlocals
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            found[name] = getattr(function, name)
    return {f".{name}": value for name, value in found.items()}


def _plain(constants: tuple[Any, ...]) -> str:
    """Returns constants in words, equal in every process, without inner code."""
    return repr(
        [
            sorted(map(repr, each)) if isinstance(each, frozenset) else each
            for each in constants
            if not inspect.iscode(each)
        ]
    )


def _globals_of(code: types.CodeType) -> set[str]:
    """Returns the names of the globals that a function and functions in it load."""
    inner = [_globals_of(part) for part in code.co_consts if inspect.iscode(part)]
    loads = (i for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    return {load.argval for load in loads}.union(*inner)


def _parts_of_class(value: type) -> dict[str, Any]:
    """Returns a class's bases, functions and values, without those Python adds."""
    parts: dict[str, Any] = {".__bases__": value.__bases__}
    for name, part in vars(value).items():
        for inner in ("fget", "func", "__func__"):  # of properties and class methods
            part = getattr(part, inner, part)
        is_special = name.startswith("__") or name == "_abc_impl"
        if inspect.isfunction(part):  # a dataclass has special ones without a file
            is_special = is_special and part.__code__.co_filename == "<string>"
        if not (is_special or inspect.isdatadescriptor(part)):
            parts[f".{name}"] = part
    return parts


def _parts_of(value: Any) -> dict[str, Any]:
    """Returns what pickle and copy make an object of; of a module, how it computes."""
    if isinstance(value, nn.Module):
        own, kind = vars(value), type(value)
        state = {name: own[name] for name in sorted(own.keys() - _NOT_VALUES)}
        state |= {name: list(own[name].values()) for name in _HOOKS if own[name]}
        state |= value._parameters | value._buffers | value._modules
        parts = {".__class__": kind, ".forward": kind.forward}
        return parts | {f".{name}": part for name, part in state.items()}
    reduce = copyreg.dispatch_table.get(type(value))
    reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):  # the name of a global
        return {".__wrapped__": value.__wrapped__}
    make, arguments, state, *more = [*reduced, None]
    state = state if isinstance(state, dict) else {"__getstate__": state}
    parts = {f".{name}": state[name] for name in sorted(state.keys() - _NOT_VALUES)}
    parts[".items"] = [list(items) for items in more if items]
    return {".__class__": type(value), ".__new__": (make, *arguments), **parts}
