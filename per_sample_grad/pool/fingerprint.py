"""What computes a value, written down: source text, versions, tensors and attributes.

A description maps the path of every part, such as ``loss.label_smoothing``, to a short
text that another process writes too. Code of Python and of installed packages is
described by its name and version; other functions by their source text without comments
and by the globals, defaults, attributes and closure that they load; classes and modules
by what they have; datasets by their public attributes; files in a list by their sizes
and times; other objects by what pickle saves of them. All else is an error.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import hashlib
import inspect
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from xla_replica import Replica

_PLAIN: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes)
_PLAIN += (range, type(...), torch.dtype, torch.layout, torch.memory_format)
_CONTAINERS = (tuple, list, set, frozenset, dict)
# What pickle does not save, or only by name, and the attributes that make it up.
_WRAPPERS: tuple[type, ...] = (types.MethodType, property, classmethod, staticmethod)
_WRAPPERS += (functools.cached_property, functools.partial)
_WRAPPED = ("__self__", "__func__", "fget", "fset", "func", "args", "keywords")
# What pickle saves of an object, by names that no attribute has.
_SAVED = ("(make)", "(arguments)", "(state)", "(items)", "(pairs)", "(restore)")
# Attributes that compute nothing: those of every module, Lightning's trainer, and what
# transformers notes in objects, such as which warnings were shown.
_NOT_VALUES = {*vars(nn.Module()), "_trainer", "_fabric", "_original_object_hash"}
_NOT_VALUES |= {"deprecation_warnings", "warnings_issued"}
_HOOKS = ("ward_hooks", "ward_pre_hooks")
_PYTHON = Path(os.__file__).parent
_parsed = functools.lru_cache(16)(ast.parse)


def fingerprint(values: Mapping[str, Any], tag: str | None = None) -> dict[str, str]:
    """Returns texts by path that differ where the values would compute otherwise.

    Args:
        values: What to describe, by name; names begin the paths.
        tag: Stands for what cannot be described, such as an open file or a function
            without source text; None: they are an error.

    Raises:
        TypeError: A part cannot be described, and there is no ``tag``; the message
            names its path.

    >>> fingerprint({"loss": functools.partial(max, 3)})["loss.args"]
    'tuple of 1 [3]'
    """
    found = {"version of torch": str(torch.__version__)}
    seen: dict[int, tuple[str, Any]] = {}  # with the values, so that ids stay theirs
    for name, value in values.items():
        found |= _described(name, value, tag, seen)
    return found


def digest(data: Any) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a text, or of bytes in a buffer.

    >>> digest("a") == digest(b"a")
    True
    """
    content = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(content).hexdigest()[:16]


def _described(path: str, value: Any, tag: str | None, seen: Any) -> dict[str, str]:
    """Returns the texts of a value and of its parts."""
    if id(value) in seen:  # a circle, or a module in two places
        return {path: f"see {seen[id(value)][0]}"}
    try:
        text, parts = _read(value)
    except Exception as error:
        if tag is None:
            raise TypeError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__}, "
                f"which cannot be compared with another run's ({error}). Pass tag=, a "
                "text of your own that stands for it: change it whenever this changes"
            ) from error
        text, parts = f"a {type(value).__qualname__}", {}
    # Whether two tuples of a program are one object is up to Python.
    if parts and not isinstance(value, tuple):
        seen[id(value)] = path, value
    found = {path: text if len(text) <= 80 else f"{text[:40]}... {digest(text)}"}
    for name, part in parts.items():
        found |= _described(f"{path}{name}", part, tag, seen)
    return found


def _read(value: Any) -> tuple[str, dict[str, Any]]:
    """Returns a text that tells a value from others of its kind, and its parts."""
    kind = type(value)
    if kind in _CONTAINERS:
        return _read_container(value)
    if kind in _PLAIN or kind.__module__ == "typing":  # such as a TypeVar of a class
        return repr(value), {}
    if isinstance(value, torch.device | Replica):
        return getattr(value, "type", "replica"), {}  # which one is up to the run
    if isinstance(value, torch.Tensor):
        bits: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} {digest(bits.numpy())}", {}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        bits = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return f"{value.dtype} {value.shape} {digest(bits)}", {}
    if isinstance(value, types.FunctionType):
        return _read_function(value)
    if isinstance(value, type):
        return _read_class(value)
    if isinstance(value, types.ModuleType):
        if installed := _installed(value.__name__, ""):
            return installed, {}
        raise TypeError("a module of your own: import what is used of it by name")
    if kind in _WRAPPERS:
        parts = {n: getattr(value, n) for n in _WRAPPED if hasattr(value, n)}
    elif isinstance(value, nn.Module):
        own = vars(value)
        parts = {"__class__": kind, "forward": kind.forward}
        parts |= {name: own[name] for name in sorted(own.keys() - _NOT_VALUES)}
        parts |= {n: [*own[n].values()] for n in own if n.endswith(_HOOKS) and own[n]}
        parts |= value._parameters | value._buffers | value._modules
    else:
        parts = _saved(value)
    return kind.__qualname__, {f".{name}": part for name, part in parts.items()}


def _read_container(value: Any) -> tuple[str, dict[str, Any]]:
    """Reads a container, one of plain data as one text; of paths, the files too."""
    items = [*(value.items() if isinstance(value, dict) else value)]
    if isinstance(value, set | frozenset):
        items = sorted(items, key=repr)
    paths = [each[0] if type(each) is tuple and each else each for each in items]
    text = f"{type(value).__name__} of {len(items)}"
    if paths and isinstance(paths[0], str | os.PathLike) and os.path.isfile(paths[0]):
        stats = [os.stat(path) for path in paths if os.path.isfile(path)]
        text += f" files {[(each.st_size, each.st_mtime_ns) for each in stats]}"
    if _is_plain(items):
        return f"{text} {items!r}", {}
    return text, {f"[{number}]": item for number, item in enumerate(items)}


def _is_plain(value: Any) -> bool:
    kind = type(value)
    items = value.items() if kind is dict else value
    is_container = kind in (tuple, list, dict)
    return kind in _PLAIN or (is_container and all(map(_is_plain, items)))


def _saved(value: Any) -> dict[str, Any]:
    """Returns what pickle saves of an object, and what a dataset shows of itself."""
    reduce = copyreg.dispatch_table.get(type(value))
    saved: Any = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(saved, str):  # the name of a global
        name = _installed(str(value.__module__), saved)
        return {"(name)": name} if name else {"__wrapped__": value.__wrapped__}
    if isinstance(known := getattr(value, "_fingerprint", None), str):  # of datasets
        return {"_fingerprint": known}
    parts = {name: part for name, part in zip(_SAVED, saved) if part is not None}
    state = parts.get("(state)", {})
    dicts = state if type(state) is tuple else (state,)  # one more of slots
    if all(each is None or type(each) is dict for each in dicts):
        parts.pop("(state)", None)
        own = {name: each[name] for each in dicts if each for name in sorted(each)}
        if isinstance(value, Dataset):
            return {n: part for n, part in own.items() if _is_shown(value, n, part)}
        parts |= {name: part for name, part in own.items() if name not in _NOT_VALUES}
    return {"__class__": type(value), **parts}


def _is_shown(dataset: Any, name: str, value: Any) -> bool:
    """Returns whether an attribute of a dataset is more than a record of requests."""
    is_list = type(value) in (list, tuple) and _is_plain(value)
    return not name.startswith("_") and not (is_list and len(value) != len(dataset))


def _read_function(function: Any) -> tuple[str, dict[str, Any]]:
    """Reads a function: name and version, or source text and globals; and variables."""
    code, known = function.__code__, function.__globals__
    parts = dict(inspect.getclosurevars(function).nonlocals)
    # What wraps another function has the other's name and module.
    module = str(known.get("__name__"))
    text = _installed(module, f"{function.__qualname__}, line {code.co_firstlineno}")
    if text is None:
        text = f"source {digest(_source(code))}"
        parts |= {name: known[name] for name in _names_in(code) & known.keys()}
        own = ("__defaults__", "__kwdefaults__", "__dict__")
        parts |= {name: getattr(function, name) or None for name in own}
    return text, {f".{n}": parts[n] for n in sorted(parts) if parts[n] is not None}


def _read_class(value: type) -> tuple[str, dict[str, Any]]:
    """Reads a class: name and version, or what it has."""
    installed = _installed(value.__module__, value.__qualname__)
    if installed and "<" not in installed:
        return installed, {}
    parts: dict[str, Any] = {".__bases__": value.__bases__}
    for name, part in vars(value).items():
        is_slot = name == "_abc_impl" or inspect.ismemberdescriptor(part)
        if not is_slot and not (name.startswith("__") and _is_of_python(part)):
            parts[f".{name}"] = part
    return f"class {value.__qualname__}", parts


def _is_of_python(special: Any) -> bool:
    """Whether Python made a special part of a class: a note, or code without a file."""
    code = getattr(getattr(special, "__func__", special), "__code__", None)
    return not callable(special) or getattr(code, "co_filename", "") == "<string>"


@functools.cache
def _installed(module: str, name: str) -> str | None:
    """Returns the name and version of what Python or a package has; None: others do."""
    package, version = module.partition(".")[0], None
    file = Path(getattr(sys.modules.get(package), "__file__", None) or os.__file__)
    if package in ("per_sample_grad", "xla_replica"):
        version = ""  # what computes other numbers has another format
    elif {"site-packages", "dist-packages"} & set(file.parts):
        version = getattr(sys.modules[package], "__version__", None)
    elif package in sys.stdlib_module_names and file.is_relative_to(_PYTHON):
        version = "of Python {}.{}".format(*sys.version_info)
    return None if version is None else f"{module}.{name} {version}"


def _source(code: types.CodeType) -> str:
    """Returns the source text of a function, without comments."""
    named = (ast.FunctionDef, ast.AsyncFunctionDef)  # maybe under another name
    kinds = (ast.Lambda,) if code.co_name == "<lambda>" else named
    tree = ast.walk(_parsed("".join(inspect.findsource(code)[0])))
    nodes: list[Any] = [each for each in tree if isinstance(each, kinds)]
    # Code begins with the first decorator.
    starts = [[*getattr(n, "decorator_list", ()), n][0].lineno for n in nodes]
    found = [n for n, line in zip(nodes, starts) if line == code.co_firstlineno]
    if len(found) != 1:
        raise ValueError(f"{len(found)} functions of its kind begin in its line")
    return ast.unparse(found[0])


def _names_in(code: types.CodeType) -> set[str]:
    """Returns what a function, and what is defined in it, may load of globals."""
    inner = [_names_in(part) for part in code.co_consts if inspect.iscode(part)]
    return {*code.co_names}.union(*inner)
