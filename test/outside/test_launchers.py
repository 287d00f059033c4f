"""The files for other people's launchers are what those launchers accept."""

import copy
import importlib.util
import sys
from types import ModuleType
from types import SimpleNamespace as Names
from typing import Any

import pytest
from support.documents import ROOT, read
from support.outside import package

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]


def example(name: str) -> dict[str, Any]:
    return package("yaml").safe_load((ROOT / "examples" / "launch" / name).read_text())


def lost(given: Any, understood: Any, path: str = "") -> list[str]:
    """Where what was understood differs from what was given."""
    understood = getattr(understood, "actual_instance", understood)  # of several types
    if isinstance(given, dict) and isinstance(understood, dict):
        return [
            place
            for key in given.keys() | understood.keys()
            for place in lost(given.get(key), understood.get(key), f"{path}/{key}")
        ]
    if isinstance(given, list) and isinstance(understood, list):
        pairs = zip(given, understood, strict=True)
        return [p for i, (g, u) in enumerate(pairs) for p in lost(g, u, f"{path}/{i}")]
    return [] if given == understood else [path]


def understood_by_jobset(given: dict[str, Any]) -> dict[str, Any]:
    """Reads a JobSet by the models that are generated from its OpenAPI schema."""
    models = package("kubeflow_trainer_api.models")
    return models.JobsetV1alpha2JobSet.from_dict(given).to_dict()


def test_the_jobset_has_only_fields_of_its_schema():
    given = example("jobset.yaml")
    assert given["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert given["kind"] == "JobSet"
    assert lost(given, understood_by_jobset(given)) == []
    # All hosts of the slice, whose topology is that of the selector.
    job = given["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"]
    assert job["parallelism"] * chips == int(rows) * int(columns)
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    memory = {"name": "memory", "mountPath": "/dev/shm"}  # of loader workers
    assert memory in pod["containers"][0]["volumeMounts"]
    assert {"name": "memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    # What a preempted spot node grants at most.
    assert pod["terminationGracePeriodSeconds"] <= 25
    # What would be wrong is found.
    pod["gracePeriodSeconds"] = 1
    place = "/spec/replicatedJobs/0/template/spec/template/spec/gracePeriodSeconds"
    assert lost(given, understood_by_jobset(given)) == [place]
    job["parallelism"] = "four"
    with pytest.raises(ValueError, match="parallelism"):
        understood_by_jobset(given)


@pytest.fixture
def schemas(monkeypatch) -> ModuleType:
    """SkyPilot's module of JSON schemas, without what else importing it would need."""
    spec = importlib.util.find_spec("sky")
    if spec is None:
        package("sky")  # skips, or fails where it must be there
    path = list(spec.submodule_search_locations)
    storage = Names(StoreType=[], StorageMode=[], FileMountType=[])
    stand_ins = {
        "sky": Names(__version__="0.0.0", __commit__="", __path__=path, __spec__=spec),
        "sky.skylet.autostop_lib": Names(AutostopWaitFor=Names(supported_modes=list)),
        "sky.server": Names(daemons=Names(INTERNAL_REQUEST_DAEMONS=[])),
        "sky.data": Names(storage=storage),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    skylet = importlib.import_module("sky.skylet")
    skylet.autostop_lib = stand_ins["sky.skylet.autostop_lib"]
    yield importlib.import_module("sky.utils.schemas")
    for name in [name for name in sys.modules if name.split(".")[0] == "sky"]:
        monkeypatch.delitem(sys.modules, name)


def errors_in(task: dict[str, Any], schemas: ModuleType) -> list[str]:
    """What SkyPilot would refuse, part by part as it checks a task."""
    parts = [(task, schemas.get_task_schema())]
    parts += [(task["resources"], schemas.get_resources_schema())]
    parts += [(m, schemas.get_storage_schema()) for m in task["file_mounts"].values()]
    validator = package("jsonschema").Draft202012Validator
    found = [validator(schema).iter_errors(part) for part, schema in parts]
    return [error.message for errors in found for error in errors]


def test_the_task_for_skypilot_has_only_fields_of_its_schema(schemas):
    task = example("skypilot.yaml")
    assert errors_in(task, schemas) == []
    wrong = copy.deepcopy(task)
    wrong["resources"]["spot"] = True
    wrong["file_mounts"]["/shared"]["moda"] = "MOUNT"
    wrong["setups"] = "pip install"
    found = "".join(errors_in(wrong, schemas))
    assert all(word in found for word in ("spot", "moda", "setups"))
    # That of `Stopped`, which the checkpointer raises for SIGTERM after a save.
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]


def test_pages_name_every_file():
    page = read("docs/resuming.md") + read("docs/machines.md")
    for path in (ROOT / "examples" / "launch").glob("*.*"):
        assert f"examples/launch/{path.name}" in page
