"""Numbers on the pages are those of the records that they cite."""

import json
import re
from collections import Counter

import pytest
from support.documents import ROOT, read

BALANCE_TYPES = ("mean", "pair", "recursive", "recursive-pair")
MODELS = {  # by their names in the tables, those in the records
    "CNN": "cnn",
    "transformer": "transformer",
    "softmax regression": "softmax regression",
    "multilayer perceptron": "mlp",
}


def record(name: str) -> dict:
    [path] = ROOT.glob(f"docs/benchmarks/*{name}*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def table(page: str, header: str) -> list[list[str]]:
    """Returns the cells of the rows below the header that begins with a text."""
    found = re.search(rf"(?m)^{re.escape(header)}.*\n.*\n((?:\|.*\n)+)", read(page))
    rows = found.group(1).splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def check(row: str, shown: str, expected: float, digits: int) -> None:
    half = 0.5 * 10**-digits if expected < 10 else 0.5
    assert float(shown) == pytest.approx(expected, abs=half * 1.02), row


def test_what_a_comparison_in_every_pass_costs():
    found = record("outside_compared")
    rows = table("docs/outside.md", "| model | training, ms")
    for name, training, once, always in rows:
        prices = found["prices"][name.split(",")[0]]
        check(name, training, prices["training_ms"], 0)
        check(name, always, prices["every pass"], 2)
        assert once == str(prices.get("once", ""))
    assert [*Counter(found["compared"].values()).values()] == [4, 12]
    for text in ("four are compared in every pass", "In twelve more"):
        assert text in " ".join(read("docs/outside.md").split())


def check_costs(model: str, batch: int, way: str, numbers: list[str], digits: int):
    """Compares a row's times of balance types, and the memory of `mean`."""
    cells = record("bench_grab-training")["cells"]
    [cell] = [c for c in cells if (c["model"], c["batch"]) == (MODELS[model], batch)]
    for balance_type, shown in zip(BALANCE_TYPES, numbers):
        if shown:
            check(way, shown, cell[f"{balance_type}, {way}"][0], digits)
    check(way, numbers[4], cell[f"mean, {way}"][1], digits)


def test_what_an_epoch_costs():
    model = ""
    for name, *numbers in table("docs/grab_xla.md", "| | `mean` | `pair` | `rec"):
        named = [each for each in MODELS if name.startswith(each)]
        [model], way = named or [model], "exact" if named else name.split(", ", 1)[0]
        way = "exact, from samples" if name.startswith("exact, from") else way
        check_costs(model, 32, way, numbers, 1)


def test_what_a_training_step_costs():
    rows = table("docs/benchmarks/README.md", "| | mean | pair | recursive | rec")
    for name, *numbers in rows:
        model, batch, way = re.fullmatch(r"(.*?), (\d+): (.*)", name).groups()
        check_costs(model, int(batch), way, numbers, 2)


def test_what_a_balance_step_takes_of_memory():
    rows = table("docs/grab_xla_details.md", "| | grab-sampler 0.1.3 | grab_xla |")
    cells = record("bench_grab-memory")["cells"][: len(rows)]
    for cell, (name, *numbers) in zip(cells, rows, strict=True):
        assert name.strip("`").startswith(cell["type"]), name
        found = [value for value in cell.values() if isinstance(value, float)]
        assert [int(shown) for shown in numbers] == [round(value) for value in found]


def test_what_groups_and_projections_keep_of_the_gain():
    kept = record("convex-groups")["problems"]["digits"]["share_kept"]
    [row] = [r for r in table("docs/grab_xla_details.md", "| `mean`, `pair` in groups")
             if r[0] == "digits"]  # fmt: skip
    for size, shown in zip((2, 4, 8, 16), row[1:]):
        values = [kept[f"{name} in groups of {size}"] for name in ("mean", "pair")]
        assert shown == ", ".join(f"{value:.2f}" for value in values)
    kept = record("convex-projected")["problems"]["digits"]["share_kept"]
    for size, *shown in table("docs/grab_xla.md", "| numbers | `mean`"):
        values = [kept[f"{name} of {size}"] for name in ("mean", "pair")]
        assert shown == [f"{value:.2f}" for value in values]


def test_accuracies_of_sparse_networks():
    recorded = record("rigl_digits")["accuracy"]
    for name, *shown in table("docs/rigl_xla.md", "| test accuracy in % | dense"):
        found = recorded[f"0.{name.split()[0]}"]
        means = [sum(found[way]) / 5 for way in ("dense", "static", "set", "rigl")]
        assert [cell.strip("*") for cell in shown] == [f"{mean:.1f}" for mean in means]


def test_what_seesaw_saves():
    rows = table("docs/traces.md", "| learning rate and batch | updates")
    ways = record("seesaw")["ways"].values()
    for way, (_, updates, train, test, accuracy) in zip(ways, rows):
        assert int(updates) == way["updates"]["mean"]
        digits = {"train_loss": 4, "test_loss": 3, "accuracy": 1}
        for shown, key in zip((train, test, accuracy.removesuffix(" %")), digits):
            found = [f"{way[key][k]:.{digits[key]}f}" for k in ("mean", "deviation")]
            assert shown == " ± ".join(found)


def test_what_norms_cost():
    models = record("bench_per_sample-norms")["models"].values()
    text = " ".join(read("docs/per_sample_grad.md").split())
    for way in ("per_sample_grad", "by hand"):
        times = [f"{m['ways'][f'norms: {way}']['time']:.2f}" for m in models]
        # Nothing but words and sizes in parentheses is between the three numbers.
        assert re.search(r"[^.]*?".join(map(re.escape, times)), text), times
