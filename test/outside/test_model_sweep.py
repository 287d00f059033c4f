"""Models of other libraries: norms are never wrong, coverage is that of the page."""

import pytest
import torch
from support.outside import package
from support.xla_replica.replicas import slow

import per_sample_grad as psg
from tools.outside import models, sweep_models
from tools.outside.sweep_models import Found

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]

RECORDED = sweep_models.recorded()
FOUND = {
    (library, name): Found(**found)
    for library, swept in RECORDED.items()
    for name, found in swept["models"].items()
}
# `make outside` runs all of them, and the default tests these.
QUICK = ("mobilenet_v2", "shufflenet_v2_x0_5", "squeezenet1_1")
ROWS = [key if key[1] in QUICK else slow(*key) for key in FOUND]
REGENERATE = "run `python tools/outside/sweep_models.py` and commit what it writes"


def cases(library: str) -> dict[str, models.Case]:
    package(library)
    return models.LIBRARIES[library]()


@pytest.mark.parametrize(("library", "name"), ROWS)
def test_norms_are_right_and_the_outcome_is_in_the_table(library, name):
    found = sweep_models.examine(cases(library)[name])
    if sweep_models.versions(library) != RECORDED[library]["versions"]:
        return  # the table is of other versions; that norms are right is seen here too
    before = FOUND[library, name]
    assert found.rank() >= before.rank(), f"worse: {found}, and before {before}"
    assert found.rank() == before.rank(), f"better: {found}; {REGENERATE}"


@pytest.mark.parametrize("library", ["torchvision", "timm", "peft"])
def test_what_models_need_is_imported_beside_a_torch_for_cpus(library):
    package(library)


@pytest.mark.parametrize("library", models.LIBRARIES)
def test_every_model_is_in_the_table(library):
    assert cases(library).keys() == RECORDED[library]["models"].keys()


def test_the_page_shows_what_was_recorded():
    shown = sweep_models.table(RECORDED)
    assert sweep_models.PAGE.read_text("utf-8") == sweep_models.page_with(shown)


def test_an_outcome_that_changes_is_better_or_worse():
    covered = Found("covered", 9, 0, "")
    few, many = (Found("fallback", 9, n, "") for n in (2, 5))
    refused = Found("refused", 9, 9, "")
    assert covered.rank() > few.rank() > many.rank() > refused.rank()
    before = {"a": vars(few), "b": vars(few), "c": vars(few), "d": vars(few)}
    after = {"a": vars(many), "b": vars(covered), "c": vars(few)}
    assert sweep_models.worse(before, after) == ["a", "d"]


def test_wrong_norms_end_a_sweep(monkeypatch):
    def of_sums(model, ids, classes):
        return model(ids[:, :3].float()).square().sum(1)

    case = models.Case(lambda: torch.nn.Linear(3, 5), models.tokens, of_sums)
    assert sweep_models.examine(case).outcome == "covered"
    norms = psg.per_sample_grad_norms
    wrong = lambda *a, **o: 1.01 * norms(*a, **o)  # noqa: E731
    monkeypatch.setattr(psg, "per_sample_grad_norms", wrong)
    with pytest.raises(sweep_models.WrongNorms, match="differ"):
        sweep_models.examine(case)
