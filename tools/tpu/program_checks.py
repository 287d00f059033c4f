"""What is wrong with programs, told from their text alone.

torch_xla writes every program that it is given, by replica, when
``XLA_SAVE_TENSORS_FILE`` names a file. These are pure functions of that text, and need
neither JAX nor torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

# Between the cases of one run, in the file of a replica; and before a case's last step.
CASE_MARK, LAST_STEP_MARK = "## CASE ", "## LAST STEP"
# Operations that move numbers and compute nothing.
_MOVES = re.compile(
    "bitcast|broadcast|concatenate|constant|convert|copy|get-tuple-element|iota|pad|"
    "parameter|reshape|reverse|slice|transpose|tuple|while"
)
_GRAPH = re.compile(
    r"^TensorsGraphInfo:\n(?P<frames>.*?)\n\n.*?"
    r"^## BEGIN_GRAPH\n(?P<text>.*?)^Graph Hash:.*?^## END_GRAPH",
    re.DOTALL | re.MULTILINE,
)
_FRAME = re.compile(r"^  (\S+) \((.*)\)$", re.MULTILINE)
_OPERATION = re.compile(r"= ([a-z]+\d*)\[([\d,]*)\]\S* ([a-z][a-z0-9-]*)\((.*)")
_PRODUCT = re.compile(
    r"= \w+\[([\d,]*)\]\S* (?:dot|convolution)\(\w+\[([\d,]*)\].*? \w+\[([\d,]*)\](.*)"
)
_PRECISION = re.compile(r"operand_precision=\{(\w+),(\w+)\}")
_WIDE = re.compile(r"\b([su]64)\[([\d,]+)\]")
_DOUBLE = re.compile(r"\b(f64)\[([\d,]+)\]")
_LITERAL = re.compile(r"constant\((?:\{.*?\}|[^()]*)\)")
_COLLECTIVE = re.compile(
    r"= (\S+|\([^)]*\)) (all-reduce|all-gather|all-to-all|reduce-scatter|"
    r"collective-permute)\("
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program as a replica gave it to XLA.

    Attributes:
        text: Its HLO, without its name and what else says nothing about it.
        place: The file and line that ran it, of the innermost caller that is neither
            torch_xla nor the backend.
    """

    text: str
    place: str

    @property
    def collectives(self) -> list[str]:
        """Kind and shape of every collective."""
        return [f"{kind} {shape}" for shape, kind in _COLLECTIVE.findall(self.text)]


def programs_by_case(log: str, last_step: bool = False) -> dict[str, list[Program]]:
    """Returns the programs that a replica ran, in their sequence, by case.

    Args:
        log: What torch_xla wrote for this replica, with `CASE_MARK` and a name before
            the programs of every case. Those before the first are left out.
        last_step: Only those after `LAST_STEP_MARK`, which all cases need not have.
    """
    found: dict[str, list[Program]] = {}
    for part in log.split(f"\n{CASE_MARK}")[1:]:
        name, _, rest = part.partition("\n")
        if last_step:
            rest = rest.partition(f"\n{LAST_STEP_MARK}\n")[2]
        found[name] = [
            Program(_anonymous(graph["text"]), _place(graph["frames"]))
            for graph in _GRAPH.finditer(rest)
        ]
    return found


def products(program: Program) -> list[tuple[str, str]]:
    """Returns the shapes and the precision of every product of matrices, in order.

    Dimensions of size one are left out of ``result = left x right``.
    """
    found = []
    for *shapes, rest in _PRODUCT.findall(program.text):
        result, left, right = (
            ",".join(size for size in shape.split(",") if size != "1")
            for shape in shapes
        )
        precision = _PRECISION.search(rest)
        names = set(precision.groups() if precision else ["default"])
        found.append((f"{result} = {left} x {right}", "/".join(sorted(names))))
    return found


def distinct(programs: Iterable[Program]) -> list[Program]:
    """Returns each program once."""
    return list({program.text: program for program in programs}.values())


def baked_numbers(programs: Iterable[Program]) -> list[str]:
    """Returns what says that programs differ in nothing but numbers written in them.

    A number that changes between steps, and is a constant of the program, compiles
    another one at every change.
    """
    alike: dict[str, list[Program]] = {}
    for program in distinct(programs):
        # What takes no data makes some, once: zeros, random numbers.
        if " parameter(" in program.text:
            alike.setdefault(_LITERAL.sub("constant()", program.text), []).append(
                program
            )
    found = []
    for same in alike.values():
        if len(same) == 1:
            continue
        numbers = [_LITERAL.findall(program.text) for program in same]
        changed = [sorted(set(each)) for each in zip(*numbers) if len(set(each)) > 1]
        found.append(
            f"{len(same)} programs at {same[0].place} differ only in numbers that are "
            f"written in them, {changed[0][:3]}: bring what changes to the device with "
            "Replica.scalar"
        )
    return found


def float64_arrays(programs: Iterable[Program]) -> list[str]:
    """Returns what says which programs take or compute arrays of float64.

    A TPU emulates them. Python numbers, which torch_xla uploads as single numbers and
    converts, are left out; what compares a tensor with one is not.
    """
    found = []
    for program in distinct(programs):
        arrays = set()
        for dtype, shape, operation, operands in _OPERATION.findall(program.text):
            wide = _DOUBLE.search(f"{dtype}[{shape}] {operands}")
            if wide and (operation == "parameter" or not _MOVES.fullmatch(operation)):
                arrays.add((wide[2], operation))
        found += [
            f"the program at {program.place} has a {operation} of f64[{shape}]: "
            "convert to float32 on the host, and compare with xla_replica.comparable"
            for shape, operation in sorted(arrays)
        ]
    return found


def wide_integers(program: Program) -> dict[str, int]:
    """Returns how often arrays of 64-bit integers are computed with, by operation.

    A TPU emulates them. What only moves or converts them, and single numbers, are left
    out.
    """
    found: dict[str, int] = {}
    for dtype, shape, operation, operands in _OPERATION.findall(program.text):
        wide = _WIDE.search(f"{dtype}[{shape}] {operands}")
        if wide and not _MOVES.fullmatch(operation):
            name = f"{operation} {wide[1]}[{wide[2]}]"
            found[name] = found.get(name, 0) + 1
    return found


def differences(by_replica: Sequence[Iterable[Program]]) -> list[str]:
    """Returns what says which programs some replicas ran and others did not.

    Programs with a collective must be one, or replicas wait for each other forever;
    others are compiled once for every replica that differs.

    Args:
        by_replica: The programs of each replica, by rank.
    """
    ranks: dict[str, list[int]] = {}
    places: dict[str, str] = {}
    for rank, programs in enumerate(by_replica):
        for program in distinct(programs):
            ranks.setdefault(program.text, []).append(rank)
            places.setdefault(program.text, program.place)
    return [
        f"the program at {places[text]} ran on replicas {some} of {len(by_replica)} "
        "only: a Python number, a shape or a pending tensor differs between replicas"
        for text, some in ranks.items()
        if len(some) < len(by_replica)
    ]


def problems(by_replica: Mapping[int, Sequence[Program]]) -> list[str]:
    """Returns all that is wrong with the programs of a case, one sentence each."""
    in_order = [by_replica[rank] for rank in sorted(by_replica)]
    every = [program for programs in in_order for program in programs]
    return [*differences(in_order), *baked_numbers(every), *float64_arrays(every)]


def _anonymous(text: str) -> str:
    """Returns the text of a program without its name and where it came from."""
    name = re.match(r"HloModule ([^\s,]+)", text)
    if name is not None:
        text = text.replace(name[1], "program")
    return re.sub(r", metadata=\{[^}]*\}", "", text)


def _place(frames: str) -> str:
    """Returns ``file:line`` of the innermost frame that says something."""
    found = [where for _, where in _FRAME.findall(frames)]
    own = [
        where
        for where in found
        if "site-packages" not in where and "/xla_replica/" not in where
    ]
    folders = (own or found or ["an unknown place"])[0].split("/")
    return "/".join(folders[-3:])
