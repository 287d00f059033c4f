"""Runs of Hugging Face's trainer under a trace, and the same in plain torch.

Nothing of transformers is imported before a function is called.
"""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.variable_batch_size.elastic import Case, batches
from support.variable_batch_size.resuming import loss_of
from tools.outside.models import import_torchvision

# Two epochs of 32 minibatches, in 9 and 10 steps of 1 to 9: some replicas are idle, in
# the first and the last of an epoch too, and some have several substeps.
EXACT = Case((4, 36, 8, 4, 12, 32, 20, 4), epochs=2, rule="linear", exact=True)
EVERY = 3  # steps between two checkpoints


class ExactModel(nn.Module):
    """Its gradients are multiples of 1/64, so that sums of them are never rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1, dtype=torch.float64)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(-3.0, 3.0) / 4)
            self.linear.bias.fill_(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.linear, x, y)}


def exact_data() -> list[dict[str, Any]]:
    """Returns samples whose ``index`` the model does not take."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (EXACT.num_samples, 6), generator=generator).double()
    y = torch.randint(0, 3, (EXACT.num_samples,), generator=generator).double()
    return [{"x": x[i], "y": y[i], "index": i} for i in range(len(x))]


class Keep:
    """Collates samples as torch does, and keeps the column that trainers remove."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return torch.utils.data.default_collate(samples)


def arguments(folder: Path | str, **changes: Any) -> Any:
    """Returns training arguments for minibatches of 4 samples on a CPU."""
    from transformers import TrainingArguments

    settings = {
        "use_cpu": True,
        "per_device_train_batch_size": EXACT.minibatch_size,
        "num_train_epochs": EXACT.epochs,
        "lr_scheduler_type": "linear",
        "learning_rate": 2**-4,
        "logging_steps": 1,
        "max_grad_norm": 0.0,
        "save_steps": EVERY,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return TrainingArguments(str(folder), **settings | changes)


def recording(*others: type) -> type:
    """Returns `ElasticTrainer`, such that it notes the samples of every step."""
    from variable_batch_size.integrations.hugging_face import ElasticTrainer

    class Recording(ElasticTrainer, *others):
        def training_step(self, model, inputs, num_items_in_batch=None):
            rows = [minibatch.pop("index").tolist() for minibatch in inputs]
            self.seen.append((self.state.global_step, rows))
            return super().training_step(model, inputs, num_items_in_batch)

    Recording.seen = []
    return Recording


def exact_trainer(
    folder: Path | str,
    callbacks: Any = (),
    args: Any = None,
    on_end: str = "cycle",
    **changes: Any,
) -> Any:
    """Returns a trainer of the exact model; its optimizer is SGD with momentum."""
    model = ExactModel()
    return recording()(
        model,
        args or arguments(folder, **changes),
        Keep(),
        exact_data(),
        trace=EXACT.trace,
        rule=EXACT.rule,
        ref_batchsize=EXACT.ref_batchsize,
        on_end=on_end,
        callbacks=[*callbacks],
        optimizers=(torch.optim.SGD(model.parameters(), 2**-4, momentum=0.5), None),
    )


def exact_run(
    rank: int,
    folder: str,
    resumes: bool = False,
    at: dict[int, tuple[int, int]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Trains the exact model; returns weights, samples by step, and what was logged.

    Args:
        rank: This process.
        folder: Of the checkpoints.
        resumes: Whether to begin at the newest whole checkpoint.
        at: By rank: after which step the process sends itself which signal.
        changes: Of the training arguments.
    """
    import_torchvision()  # in a new process
    from transformers import TrainerCallback

    class Signal(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            step, number = (at or {}).get(rank, (None, 0))
            if state.global_step == step:
                os.kill(os.getpid(), number)

    trainer = exact_trainer(folder, [Signal()], **changes)
    trainer.train(resume_from_checkpoint=resumes)
    return {
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "seen": trainer.seen,
        "logs": trainer.state.log_history,
        "epoch": trainer.state.epoch,
    }


def global_batches(outcomes: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Returns the sorted samples of every step, over all processes."""
    found: dict[int, list[int]] = {}
    for outcome in outcomes:
        for step, minibatches in outcome["seen"]:
            found.setdefault(step, []).extend(i for m in minibatches for i in m)
    return {step: sorted(found[step]) for step in sorted(found)}


def expected_batches(case: Case = EXACT) -> dict[int, list[int]]:
    """Returns the same of a single process, in the obvious way."""
    steps = enumerate(batches(case))
    return {step: sorted(rows.tolist()) for step, (_, rows) in steps}


KILL = signal.SIGKILL

# --- a language model -----------------------------------------------------------------

TEXTS = Case((4, 16, 12, 32, 4, 4, 8, 24, 16), epochs=2, num_samples=64)
LENGTH = 12
NORM = 0.5


def language_model() -> nn.Module:
    """Returns a tiny GPT-2, in float64 and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def texts() -> list[dict[str, torch.Tensor]]:
    """Returns texts in which different numbers of tokens count; in some, none."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(TEXTS.num_samples):
        tokens = torch.randint(32, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: number % (LENGTH + 1)] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def with_own_loss(kind: str | None) -> type:
    """Returns `ElasticTrainer`, or a subclass as users write it: with a loss of its own
    (``"own"``), or with a term added to the trainer's (``"term"``).
    """
    from variable_batch_size.integrations.hugging_face import ElasticTrainer

    class Own(ElasticTrainer):
        def compute_loss(
            self, model, inputs, return_outputs=False, num_items_in_batch=None
        ):
            outputs = model(input_ids=inputs["input_ids"])
            logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            number = num_items_in_batch
            loss = loss / ((labels != -100).sum() if number is None else number)
            return (loss, outputs) if return_outputs else loss

    class Term(ElasticTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **options):
            loss, outputs = super().compute_loss(model, inputs, True, **options)
            loss = loss + penalty(model)
            return (loss, outputs) if return_outputs else loss

    return {None: ElasticTrainer, "own": Own, "term": Term}[kind]


def penalty(model: nn.Module) -> torch.Tensor:
    """Returns a term that a user adds to a loss; no gradient of it begins as zero."""
    return 0.1 * sum((1 - each).square().sum() for each in model.parameters())


def text_run(
    rank: int, folder: str, kind: str | None = None, **changes: Any
) -> dict[str, Any]:
    """Trains the language model; returns its weights and the logs."""
    import_torchvision()  # in a new process
    trainer = with_own_loss(kind)(
        language_model(),
        arguments(
            folder, max_grad_norm=NORM, warmup_steps=3, weight_decay=0.1, seed=42,
            learning_rate=2**-8, save_strategy="no", eval_strategy="epoch", **changes
        ),
        train_dataset=texts(),
        eval_dataset=texts()[:10],
        trace=TEXTS.trace,
        rule="root",
        ref_batchsize=16,
    )  # fmt: skip
    trainer.train()
    return {
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "logs": trainer.state.log_history,
    }


def text_run_in_plain_torch(
    kind: str | None = None,
) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """Does the same with one batch a step; returns weights, losses, norms and rates."""
    from transformers import Trainer, get_linear_schedule_with_warmup

    model = language_model()
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n not in decayed]},
    ]
    optimizer = torch.optim.AdamW(groups, 2**-8, weight_decay=0.0)
    steps = [*batches(TEXTS)][: len(TEXTS.trace)]
    scheduler = get_linear_schedule_with_warmup(optimizer, 3, len(steps))
    told = []
    for _, rows in steps:
        samples = [texts()[row] for row in rows.tolist()]
        tokens = torch.stack([sample["input_ids"] for sample in samples])
        labels = torch.stack([sample["labels"] for sample in samples])[:, 1:]
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if kind == "term":
            loss = loss + penalty(model)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
        reference = copy.deepcopy([group["lr"] for group in optimizer.param_groups])
        factor = (len(rows) / 16) ** 0.5
        for group, lr in zip(optimizer.param_groups, reference):
            group["lr"] = lr * factor
        optimizer.step()
        for group, lr in zip(optimizer.param_groups, reference):
            group["lr"] = lr
        scheduler.step()
        told.append(
            {
                "loss": loss.item(),
                "grad_norm": norm.item(),
                "learning_rate": reference[0],
                "effective_learning_rate": reference[0] * factor,
                "batch_size": len(rows),
            }
        )
    return [p.detach() for p in model.parameters()], told
