"""What users train with beside this project: each run equals a plain loop in torch."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.documents import ROOT, block, blocks
from support.outside import package
from support.per_sample_grad import norms_of
from support.variable_batch_size.hugging_face import language_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import per_sample_grad as psg
import variable_batch_size as vbs

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]

TRACE, REFERENCE = [8, 16, 4, 24, 12, 8, 16, 8], 8
NUM_SAMPLES = sum(TRACE)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(NUM_SAMPLES, 1, generator=generator).double())


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def sampler_of(dataset, order) -> vbs.CustomSampler:
    options = {"minibatch_size": 4, "order": order, "verbose": False}
    return vbs.CustomSampler(dataset, TRACE, **options)


def elastic(optimizer: torch.optim.Optimizer, dataset, **options):
    """Returns the sampler of an epoch in the order of the dataset, and a wrapper."""
    sampler = sampler_of(dataset, range(NUM_SAMPLES))
    return sampler, vbs.LinearRuleOptimizer(optimizer, sampler, REFERENCE, **options)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def plain_loop(model, optimizer, loss_of, dataset) -> list[torch.Tensor]:
    """Trains on a whole batch for every row of the trace; returns the weights."""
    [lr] = {group["lr"] for group in optimizer.param_groups}
    for batch in zip(*(tensor.split(TRACE) for tensor in dataset.tensors)):
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        for group in optimizer.param_groups:
            group["lr"] = lr * len(batch[0]) / REFERENCE
        optimizer.step()
    return [parameter.detach() for parameter in trained(model)]


def mean_square(model, x, y):
    return F.mse_loss(model(x), y)


def assert_same(model, expected) -> None:
    found = [parameter.detach() for parameter in trained(model)]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prepared", ["nothing", "model", "optimizer", "loader"])
def test_a_loop_with_accelerate(prepared):
    accelerate, dataset = package("accelerate"), data()
    expected, model = mlp(), mlp()
    of = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    weights = plain_loop(expected, of(expected.parameters()), mean_square, dataset)
    accelerator = accelerate.Accelerator(cpu=True)
    sampler, optimizer = elastic(of(model.parameters()), dataset)
    loader = DataLoader(dataset, batch_sampler=sampler)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if prepared in parts:
        parts[prepared] = accelerator.prepare(parts[prepared])
    for x, y in parts["loader"]:
        accelerator.backward(mean_square(parts["model"], x, y))
        parts["optimizer"].step()
    assert_same(model, weights)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerates_own_accumulation_is_refused():
    accelerate, dataset, model = package("accelerate"), data(), mlp()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    sampler, optimizer = elastic(torch.optim.SGD(model.parameters(), 1), dataset)
    x, y = next(iter(DataLoader(dataset, batch_sampler=sampler)))
    accelerator.backward(mean_square(model, x, y))
    with pytest.raises(ValueError, match=r"\(gradient_accumulation_steps=2\) divides"):
        optimizer.step()
    accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1)


def test_a_schedule_free_optimizer():
    schedulefree, dataset = package("schedulefree"), data()

    def optimizer_of(model):
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
        optimizer.train()
        return optimizer

    expected = mlp()
    optimizer = optimizer_of(expected)
    plain_loop(expected, optimizer, mean_square, dataset)
    optimizer.eval()
    sampler, wrapper = elastic(optimizer_of(model := mlp()), dataset)
    for x, y in DataLoader(dataset, batch_sampler=sampler):
        mean_square(model, x, y).backward()
        wrapper.step()
    before = [p.detach().clone() for p in model.parameters()]
    wrapper.eval()
    assert_same(model, [parameter.detach() for parameter in expected.parameters()])
    assert not all(map(torch.equal, before, model.parameters()))


# --- PEFT -----------------------------------------------------------------------------

TARGET = {"target_modules": ["c_attn"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "lora": ("LoraConfig", {"r": 2}, "error"),
    "rslora": ("LoraConfig", {"r": 2, "use_rslora": True}, "error"),
    "dora": ("LoraConfig", {"r": 2, "use_dora": True}, "loop"),
    "ia3": ("IA3Config", {"feedforward_modules": []}, "loop"),
    "vera": ("VeraConfig", {"r": 2}, "loop"),
    # Of layers that are nn.Linear, as GPT-2's are not.
    "loha": ("LoHaConfig", {"r": 2}, "loop"),
    "lokr": ("LoKrConfig", {"r": 2}, "loop"),
    "oft": ("OFTConfig", {"oft_block_size": 4, "r": 0}, "error"),
}
OF_LINEARS = ("loha", "lokr", "oft")


def adapted(name: str) -> nn.Module:
    """Returns a small model with an adapter whose parameters are all random."""
    peft, (kind, options, _) = package("peft"), ADAPTERS[name]
    model, target = language_model(), TARGET
    if name in OF_LINEARS:
        model, target = mlp(), {"target_modules": ["0", "2"]}
    config = getattr(peft, kind)(**target, **options)
    model = peft.get_peft_model(model, config).double()
    torch.manual_seed(2)
    for parameter in trained(model):
        parameter.data.add_(torch.randn(parameter.shape).double() / 4)
    return model


def tokens(number: int) -> torch.Tensor:
    return torch.randint(32, (number, 12), generator=torch.Generator().manual_seed(3))


def token_losses(model, ids) -> torch.Tensor:
    return psg.token_cross_entropy(model(input_ids=ids).logits[:, :-1], ids[:, 1:])


@pytest.mark.parametrize("name", ADAPTERS)
def test_per_sample_norms_of_an_adapter_are_those_of_a_loop(name):
    model, inputs, losses_of = adapted(name), tokens(3), token_losses
    if name in OF_LINEARS:
        inputs, losses_of = data().tensors[0][:3], lambda m, x: m(x).square().sum(1)
    losses = (losses_of(model, row).sum() for row in inputs.split(1))
    expected = norms_of(losses, trained(model))
    options = {"fallback": ADAPTERS[name][2]}
    found = psg.per_sample_grad_norms(model, losses_of, (inputs,), **options)
    torch.testing.assert_close(found, expected)


def test_an_adapter_trains_under_a_trace():
    dataset, expected = TensorDataset(tokens(NUM_SAMPLES)), adapted("lora")

    def loss_of(model, ids):
        return token_losses(model, ids).mean()

    adam, model = torch.optim.AdamW(trained(expected), 0.01), adapted("lora")
    weights = plain_loop(expected, adam, loss_of, dataset)
    sampler, optimizer = elastic(torch.optim.AdamW(trained(model), 0.01), dataset)
    for [ids] in DataLoader(dataset, batch_sampler=sampler):
        loss_of(model, ids).backward()
        optimizer.step()
    assert_same(model, weights)


# --- logs, streams and notebooks -----------------------------------------------------


def test_mlflow_takes_the_numbers_of_a_run_by_log_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which MLflow 3 asks for
    mlflow = package("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    inner = torch.optim.SGD([parameter := nn.Parameter(torch.ones(1))], 0.125)
    sampler, optimizer = elastic(inner, range(NUM_SAMPLES), noise=True)
    with mlflow.start_run() as run:
        log = vbs.RunLog(None, optimizer, log_steps=3, sinks=[mlflow.log_metrics])
        optimizer.attach(log)
        for rows in sampler:
            loss = (parameter * len(rows)).sum()
            loss.backward()
            log.add(loss)
            optimizer.step()
        log.write(accuracy=70.5)
        log.close()
    client, run_id = mlflow.MlflowClient(), run.info.run_id
    found = {
        name: [(m.step, m.value) for m in client.get_metric_history(run_id, name)]
        for name in client.get_run(run_id).data.metrics
    }
    assert found["batch_size"] == [(step, TRACE[step]) for step in (0, 3, 6)]
    assert found["lr"] == [(step, TRACE[step] / 64) for step in (0, 3, 6)]
    for name in ("loss", "noise_scale"):
        assert [step for step, _ in found[name]] == [0, 3, 6]
    assert all(value > 0 for _, value in found["samples_per_second"])
    assert found["accuracy"] == [(7, 70.5)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sharded_stream_of_datasets_is_read_whole_by_every_worker(num_workers):
    rows = package("datasets").Dataset.from_dict({"x": [*range(NUM_SAMPLES)]})
    stream = rows.to_iterable_dataset(num_shards=4)
    dataset = vbs.BlockDataset.from_stream(stream.skip, NUM_SAMPLES, block_size=8)
    sampler = sampler_of(dataset, dataset.shuffled(window=3))
    positions = torch.arange(NUM_SAMPLES).numpy()
    order = sampler.order.samples(0, NUM_SAMPLES, positions).tolist()
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
    assert [x for batch in loader for x in batch["x"].tolist()] == order


CELLS = (
    "import xla_replica",
    """def train(rank, scale):
    replica = xla_replica.current()
    total = replica.scalar(scale * (rank + 1))
    replica.all_reduce_([total])
    return replica.fetch([total])[0].item()""",
    "xla_replica.launch(train, (2.0,), num_replicas=3, device='cpu')",
)


@pytest.fixture
def last_outputs(monkeypatch, tmp_path):
    """Runs the cells of a notebook in a folder, and returns what the last one shows."""
    nbformat, nbclient = package("nbformat"), package("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    where = {"resources": {"metadata": {"path": str(tmp_path)}}, "timeout": 300}

    def run(*sources: str) -> list:
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        notebook = nbformat.v4.new_notebook(cells=cells)
        nbclient.NotebookClient(notebook, kernel_name="python3", **where).execute()
        return notebook.cells[-1].outputs

    return run


def test_a_notebook_launches_a_function_of_a_cell(last_outputs):
    assert last_outputs(*CELLS)[-1]["data"]["text/plain"] == "[12.0, 12.0, 12.0]"


def test_the_quick_start_runs_in_a_notebook(last_outputs):
    command = block("README.md", "sh", "vbs make ramp").splitlines()[0]
    outputs = last_outputs(f"!{command}", *blocks("README.md", "python"))
    shown = "".join(output["text"] for output in outputs)
    assert "test accuracy" in shown
    assert "update=149/149" in shown  # a bar


def test_the_page_shows_opacus():
    package("opacus")
    x, y = data()[:5]
    names = {"F": F, "model": mlp(), "x": x, "y": y.flatten().long() * 0}
    text = block("docs/migration/per_sample_gradients.md", "python", "GradSampleModule")
    exec(text, names)
    assert {len(rows) for rows in names["gradients"].values()} == {5}
