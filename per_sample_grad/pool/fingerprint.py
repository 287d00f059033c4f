"""What computes a value, written down: code, constants, tensors and attributes.

A description maps the path of every part, such as ``loss.label_smoothing``, to a short
text. Two of them are equal if the same code would run on the same values. They are
functions of values alone: not of addresses, of hashes of texts, of file names or line
numbers, so another process writes the same, and a new comment changes nothing.

What an installed package has under an importable name is described by this name and the
version of the package. All other code is read: instructions, constants, defaults,
closures, and the global names that it loads.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from xla_replica import Replica

# A text that tells a value from others of its kind, and its parts by name.
_Read = tuple[str, dict[str, Any]]

_ATOMS = (
    *(type(value) for value in (None, True, 0, 0.0, 0j, "", b"", range(0))),
    *(type(value) for value in (..., NotImplemented)),
    *(torch.dtype, torch.layout, torch.memory_format),
)
_LONG_TEXT = 80
# A list, object or function of more parts than that is one line of a description.
_MANY_PARTS = 256
_LIBRARY = Path(os.__file__).parent
_PYTHON = "{}.{}".format(*sys.version_info)
_OWN_PACKAGES = ("per_sample_grad", "xla_replica")
# How a module computes is in its other attributes, and in these hooks.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
# What transformers notes in objects: a hash that another process does not share, and
# which warnings were shown.
_NOT_VALUES = frozenset(
    {"_original_object_hash", "deprecation_warnings", "warnings_issued"}
)
_IN_CLASSES = {
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    functools.cached_property: "func",
}
_NOT_IN_CLASSES = (types.GetSetDescriptorType, types.MemberDescriptorType)


def fingerprint(values: Mapping[str, Any], tag: str | None = None) -> dict[str, str]:
    """Returns texts by path that differ wherever the values would compute otherwise.

    Args:
        values: What to describe, by name; names begin the paths.
        tag: Stands for what cannot be described, such as an open file or a function
            in C without an importable name; None: they are an error.

    Raises:
        TypeError: A part cannot be described, and there is no ``tag``; the message
            names its path.

    >>> def loss(logits, targets, power=2):
    ...     return (logits - targets).abs() ** power
    >>> [*fingerprint({"loss": functools.partial(loss, power=3)})]
    ['loss', 'loss.func', 'loss.func.__defaults__', 'loss.func.__defaults__[0]', \
'loss.args', 'loss.keywords', "loss.keywords['power']"]
    """
    walk = _Walk(tag)
    found: dict[str, str] = {}
    for name, value in values.items():
        walk.add(name, value, found)
    return {**walk.versions, **found}


def digest(data: Any) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a text, or of bytes in a buffer.

    >>> digest("a") == digest(b"a")
    True
    """
    content = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(content).hexdigest()[:16]


class _Walk:
    """Collects descriptions of values and of all their parts."""

    def __init__(self, tag: str | None) -> None:
        self.versions: dict[str, str] = {}
        self._tag = tag
        # The values are kept, so that no other one has their id.
        self._seen: dict[int, tuple[str, Any]] = {}

    def add(self, path: str, value: Any, found: dict[str, str]) -> None:
        if id(value) in self._seen:  # a circle, or a module in two places
            found[path] = f"see {self._seen[id(value)][0]}"
            return
        try:
            text, parts = self._read(value)
        except Exception as error:
            if self._tag is None:
                raise TypeError(_indescribable(path, value, error)) from error
            text, parts = f"a {type(value).__qualname__}", {}
        # Whether two tuples of a program are one object is up to the compiler.
        if parts and not isinstance(value, tuple):
            self._seen[id(value)] = path, value
        inner = {path: _short(text)}
        for name, part in parts.items():
            self.add(path + name, part, inner)
        if len(inner) > _MANY_PARTS and not isinstance(value, nn.Module):
            inner = {path: f"{len(inner)} parts {digest(repr(inner))}"}
        found.update(inner)

    def _read(self, value: Any) -> _Read:
        name = _importable_name(value)
        version = _version(name) if name else None
        if name is None or version is None:
            return _reader(value)(value)
        if version:
            package = "Python" if version == _PYTHON else name.partition(".")[0]
            self.versions[f"version of {package}"] = version
        return name, _replaced(value) if isinstance(value, type) else {}


def _indescribable(path: str, value: Any, error: Exception) -> str:
    return (
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, of which "
        f"nobody can tell whether it computes the same in another run ({error}). Pass "
        "tag=, a text of your own that stands for it: change the text whenever this "
        "value changes"
    )


def _short(text: str) -> str:
    if len(text) <= _LONG_TEXT:
        return text
    return f"{text[: _LONG_TEXT // 2]}... {digest(text)}"


def _importable_name(value: Any) -> str | None:
    """Returns the name by which a module, class or function can be imported."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None)
    for attribute in ("__qualname__", "__name__"):  # torch.relu has only the second
        name = getattr(value, attribute, None)
        if isinstance(module, str) and isinstance(name, str):
            found: Any = sys.modules.get(module)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is value:
                return f"{module}.{name}"
    return None


@functools.cache
def _version(module_name: str) -> str | None:
    """Returns the version of a module's installed package, which stands for its code.

    None: its code may change without a version. An empty text: that of this package,
    which does not compute other scores without another format of the folder.
    """
    package = module_name.partition(".")[0]
    if package in _OWN_PACKAGES:
        return ""
    module = sys.modules.get(package)
    path = Path(getattr(module, "__file__", None) or _LIBRARY)
    if package in sys.stdlib_module_names and path.is_relative_to(_LIBRARY):
        return _PYTHON
    if not {"site-packages", "dist-packages"} & set(path.parts):
        return None
    version = getattr(module, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None
    return str(version)


def _replaced(kind: type) -> dict[str, types.FunctionType]:
    """Returns how an installed class computes, where others have replaced that."""
    found = {}
    for name in ("forward", "__call__"):
        base = next((base for base in kind.__mro__ if name in vars(base)), kind)
        part = vars(base).get(name)
        if isinstance(part, types.FunctionType):
            packages = {str(x.__module__).partition(".")[0] for x in (part, base)}
            if len(packages) == 2 and _version(str(part.__module__)) != _PYTHON:
                found[f".{name}"] = part
    return found


def _reader(value: Any) -> Callable[[Any], _Read]:
    kinds = (kind for kind in _FAMILIES if isinstance(value, kind))
    kind = next(kinds, None)
    return _READERS.get(type(value)) or (_FAMILIES[kind] if kind else _read_object)


def _read_atom(value: Any) -> _Read:
    return repr(value), {}


def _read_list(value: list[Any] | tuple[Any, ...]) -> _Read:
    kind = type(value).__name__
    return f"{kind} of {len(value)}", {f"[{n}]": x for n, x in enumerate(value)}


def _read_set(value: set[Any] | frozenset[Any]) -> _Read:
    members = sorted(value, key=lambda member: _reader(member)(member)[0])
    return type(value).__name__, {f"{{{n}}}": x for n, x in enumerate(members)}


def _read_dict(value: dict[Any, Any]) -> _Read:
    parts: dict[str, Any] = {}
    for number, (key, item) in enumerate(value.items()):
        if type(key) in _ATOMS:
            parts[f"[{key!r}]"] = item
        else:
            parts[f"[{number}]"] = (key, item)
    return f"dict of {', '.join(parts)}", parts


def _read_tensor(value: torch.Tensor) -> _Read:
    if value.layout is not torch.strided:
        return _read_object(value)
    host = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{value.dtype} {tuple(value.shape)} {digest(host)}", {}


def _read_array(value: np.ndarray) -> _Read:
    if value.dtype.hasobject:
        return _read_object(value)
    content = digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    return f"{value.dtype.str} {value.shape} {content}", {}


def _read_function(value: types.FunctionType) -> _Read:
    code = value.__code__
    parts = {
        f".{name}": getattr(value, name)
        for name in ("__defaults__", "__kwdefaults__")
        if getattr(value, name)
    }
    for name, cell in zip(code.co_freevars, value.__closure__ or ()):
        try:
            parts[f".{name}"] = cell.cell_contents
        except ValueError:
            parts[f".{name}"] = "a variable without a value"
    own = value.__globals__
    names: dict[str, set[str]] = {"global": set(), "module": set(), "attribute": set()}
    for kind, name in _loaded(code):
        names[kind].add(name)
    parts |= {f".{name}": own[name] for name in sorted(names["global"]) if name in own}
    for name in sorted(names["module"]):
        with contextlib.suppress(ImportError):  # as the function may do
            absolute = importlib.util.resolve_name(name, own.get("__package__"))
            parts[f".{name}"] = importlib.import_module(absolute)
    _open_modules(parts, names["attribute"])
    parts |= {f".{name}": part for name, part in sorted(vars(value).items())}
    return f"code {digest(repr(_code(code, value.__doc__)))}", parts


def _open_modules(parts: dict[str, Any], attributes: set[str]) -> None:
    """Adds what code may load from those parts that are modules without a version."""
    waiting, seen = list(parts.items()), set()
    for path, part in waiting:  # which grows
        if (
            not isinstance(part, types.ModuleType)
            or _version(part.__name__) is not None
        ):
            continue
        parts[path] = f"module {part.__name__}"
        if part.__name__ not in seen:
            seen.add(part.__name__)
            names = sorted(attributes & vars(part).keys())
            found = {f"{path}.{name}": vars(part)[name] for name in names}
            parts |= found
            waiting += found.items()


def _code(code: types.CodeType, doc: str | None = None) -> tuple[Any, ...]:
    """Returns what a code object does; its docstring ``doc`` has no part in that."""
    constants: list[Any] = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants.append(_code(constant))
        elif isinstance(constant, frozenset):  # in an order of its own
            constants.append(sorted(map(repr, constant)))
        else:
            constants.append(repr(None if constant is doc else constant))
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    jumps = getattr(code, "co_exceptiontable", None)  # from Python 3.11 on
    return code.co_code, constants, names, counts, code.co_flags & 0xFF, jumps


def _loaded(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Yields kinds and names of the globals, attributes and modules that code loads."""
    instructions = list(dis.get_instructions(code))
    for number, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield "global", instruction.argval
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            yield "attribute", instruction.argval
        elif instruction.opname == "IMPORT_NAME":
            level = instructions[number - 2].argval  # of a relative import
            yield "module", "." * level + instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _loaded(constant)


def _read_method(value: types.MethodType) -> _Read:
    return "method", {".__self__": value.__self__, ".__func__": value.__func__}


def _read_builtin(value: types.BuiltinMethodType) -> _Read:
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        raise TypeError(f"{value.__name__} is code in C without an importable name")
    return f"{value.__name__} in C", {".__self__": owner}


def _read_partial(value: functools.partial[Any]) -> _Read:
    names = ("func", "args", "keywords")
    return "partial", {f".{name}": getattr(value, name) for name in names}


def _read_class(value: type) -> _Read:
    parts: dict[str, Any] = {}
    for name, part in sorted(vars(value).items()):
        if type(part) in _IN_CLASSES:
            part = getattr(part, _IN_CLASSES[type(part)])
        special = name.startswith("__") and not isinstance(part, types.FunctionType)
        if not (special or name == "_abc_impl" or isinstance(part, _NOT_IN_CLASSES)):
            parts[f".{name}"] = part
    return f"class {value.__qualname__}", {**parts, ".__bases__": value.__bases__}


def _read_module(value: nn.Module) -> _Read:
    own = vars(value)
    state: Any = None
    if hasattr(value, "__getstate__"):  # which may leave out a trainer
        with contextlib.suppress(RuntimeError):  # parametrized modules refuse
            state = value.__getstate__()
    state = state if isinstance(state, dict) else own
    parts: dict[str, Any] = {".__class__": type(value)}
    for name in sorted(state.keys() - _MODULE_INTERNALS - _NOT_VALUES):
        parts[f".{name}"] = state[name]
    for name in _MODULE_HOOKS:
        if own[name]:
            parts[f".{name}"] = list(own[name].values())  # keys count all hooks
    children = itertools.chain(*(own[name].items() for name in _MODULE_PARTS))
    parts |= {f".{name}": part for name, part in children}
    return type(value).__qualname__, parts


def _read_object(value: Any) -> _Read:
    """Reads any object as pickle and copy do, which is how it can be made again."""
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):  # the name of a global
        if not hasattr(value, "__wrapped__"):
            raise TypeError(f"{reduced} is code in C without an importable name")
        return f"a {type(value).__name__}", {".__wrapped__": value.__wrapped__}
    make, arguments, state, items, pairs, *_ = (*reduced, None, None, None)
    parts: dict[str, Any] = {".__class__": type(value)}
    if make is not copyreg.__newobj__ or len(arguments) > 1:
        parts[".__new__"] = (make, *arguments)
    if isinstance(state, tuple) and all(isinstance(x, dict | None) for x in state):
        state = {name: part for each in state if each for name, part in each.items()}
    if isinstance(state, dict):
        names = sorted(state.keys() - _NOT_VALUES)
        parts |= {f".{name}": state[name] for name in names}
    elif state is not None:
        parts[".__getstate__"] = state
    for name, contents in ((".items", items), (".pairs", pairs)):
        if contents is not None:
            parts[name] = list(contents)
    return type(value).__qualname__, parts


_READERS: dict[type, Callable[[Any], _Read]] = {
    **dict.fromkeys(_ATOMS, _read_atom),
    list: _read_list,
    tuple: _read_list,
    set: _read_set,
    frozenset: _read_set,
    dict: _read_dict,
    np.ndarray: _read_array,
    types.FunctionType: _read_function,
    types.MethodType: _read_method,
    types.BuiltinMethodType: _read_builtin,
    functools.partial: _read_partial,
    weakref.ref: lambda value: ("weak reference", {"()": value()}),
    # Which of several devices of a kind it is, is that of the replica.
    torch.device: lambda value: (f"device {value.type}", {}),
}
_FAMILIES: dict[type, Callable[[Any], _Read]] = {
    torch.Tensor: _read_tensor,
    nn.Module: _read_module,
    type: _read_class,
    Replica: lambda value: ("this replica", {}),
}
