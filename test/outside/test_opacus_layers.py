"""Opacus's own tests of its layers, on our gradients in place of Opacus's."""

import importlib
import pkgutil

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from support.outside import package
from torch.nn.utils.rnn import PackedSequence

import per_sample_grad as psg

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]
package("opacus")
theirs = package("opacus.utils.per_sample_gradients_utils")

PACKAGE = "opacus.tests.grad_samples"
# Of layers with parameters that no rule accounts for: this one's are of layers that it
# does not call. They pass with fallback="loop", and are refused without it.
NEED_FALLBACK = ("RNN_test",)


@pytest.fixture(autouse=True)
def our_gradients(request, monkeypatch):
    """Answers where Opacus's tests ask Opacus for the gradient of each sample."""

    def gradients(x, module, batch_first=True, loss_reduction="mean", **others):
        torch.manual_seed(0)
        options = {"batch_dim": 1 - batch_first, "fallback": request.cls.fallback}
        with psg.capture(model := theirs.clone_module(module), **options) as recorded:
            outputs = model(*(x if type(x) is tuple else (x,)))
            if isinstance(outputs, PackedSequence):
                samples = theirs.unpack_packedsequences(outputs)
            else:
                samples = outputs.movedim(1 - batch_first, 0).unbind()
            losses = [getattr(sample.abs(), loss_reduction)() for sample in samples]
            # Without samples the losses have a graph, too.
            losses = torch.stack(losses) if losses else outputs.flatten()
        return recorded.backward(losses).materialize()

    for module in (theirs, importlib.import_module(f"{PACKAGE}.common")):
        monkeypatch.setattr(module, "compute_opacus_grad_sample", gradients)


def adapted(tests: type) -> dict[str, type]:
    """Returns classes of Opacus's tests by name: with and without a fallback."""
    name = tests.__name__
    if name not in NEED_FALLBACK:
        return {name: type(name, (tests,), {"fallback": "error"})}
    own = [test for test in dir(tests) if test.startswith("test")]
    refused = {test: _refused(getattr(tests, test)) for test in own}
    without = f"{name}_without_fallback"
    return {
        name: type(name, (tests,), {"fallback": "loop"}),
        without: type(without, (tests,), {"fallback": "error", **refused}),
    }


def _refused(test):
    """Returns a test that passes if ``test`` ends with an error of ours."""

    def run(self) -> None:
        with pytest.raises(psg.PerSampleError):
            test(self)

    return run


def collect() -> dict[str, type]:
    # Their data are drawn by hypothesis: fewer examples, and always the same.
    settings.register_profile(
        "outside", max_examples=20, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.differing_executors],
    )  # fmt: skip
    before = settings.get_current_profile_name()
    settings.load_profile("outside")
    try:
        tests = importlib.import_module(PACKAGE)
        base = importlib.import_module(f"{PACKAGE}.common").GradSampleHooks_test
        for found in pkgutil.iter_modules(tests.__path__):
            if found.name.endswith("_test"):
                importlib.import_module(f"{PACKAGE}.{found.name}")
    finally:
        settings.load_profile(before)
    return {n: each for t in base.__subclasses__() for n, each in adapted(t).items()}


globals().update(collect())
