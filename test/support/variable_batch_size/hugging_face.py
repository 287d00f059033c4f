"""A language model in Hugging Face's trainer under a trace.

Nothing of transformers is imported before a function is called.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.variable_batch_size.elastic import OPTIMIZERS, Case
from tools.outside.models import import_torchvision

# Two epochs of 4 and 6 steps of 1 to 8 minibatches: some replicas are idle, in the
# first step of an epoch too, and some have several substeps.
TEXTS = Case(
    (4, 16, 12, 32, 4, 4, 8, 24, 16), 2, "adamw", "root", lr=2**-8, num_samples=64,
    max_grad_norm=0.5,
)  # fmt: skip
DECAY = 0.75  # of the learning rate, after every update
LENGTH = 12


def language_model() -> nn.Module:
    """Returns a tiny GPT-2, in float64 and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def texts() -> list[dict[str, torch.Tensor]]:
    """Returns texts in which different numbers of tokens count; in some, none."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (TEXTS.num_samples, LENGTH), generator=generator)
    labels = tokens.clone()
    for number, each in enumerate(labels):
        each[: number % (LENGTH + 1)] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels)]


def penalty(model: nn.Module) -> torch.Tensor:
    """Returns a term that a user adds to a loss; no gradient of it begins as zero."""
    return 0.1 * sum((1 - each).square().sum() for each in model.parameters())


def over_sequences(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns a mean over sequences, each of which adds its tokens up."""
    losses = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return losses.sum(1).mean()


def with_own_loss(kind: str | None, *others: type) -> type:
    """Returns `ElasticTrainer`, or a subclass as users write it: with a loss of its own
    (``"own"``), which may be a mean over sequences (``"sequences"``) and not say so
    (``"unsaid"``), or with a term added to the trainer's (``"term"``).
    """
    from variable_batch_size.integrations.hugging_face import ElasticTrainer

    class Own(ElasticTrainer, *others):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model, inputs, num_items_in_batch=None, **options):
            logits, labels = model(inputs["input_ids"]).logits, inputs["labels"][:, 1:]
            losses = F.cross_entropy(logits[:, :-1].mT, labels, reduction="none")
            return losses.sum() / num_items_in_batch

    class Term(ElasticTrainer, *others):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model, inputs, *given, **options):
            loss = super().compute_loss(model, inputs, *given, **options)
            return loss + penalty(model)

    class Unsaid(ElasticTrainer, *others):
        def compute_loss(self, model, inputs, **options):
            return over_sequences(model(inputs["input_ids"]).logits, inputs["labels"])

    class Sequences(Unsaid):
        loss_is_scaled_for_ga = False

    kinds = {None: ElasticTrainer, "own": Own, "term": Term, "unsaid": Unsaid}
    return {**kinds, "sequences": Sequences}[kind]


def trainer_of(
    folder: Any, cls: Any = None, callbacks: Any = None, on_end="cycle", model=None,
    compute_loss_func=None, **changes: Any,
) -> Any:  # fmt: skip
    """Returns an elastic trainer; ``changes`` are of the training arguments."""
    from transformers import Seq2SeqTrainingArguments

    settings = {
        "use_cpu": True, "per_device_train_batch_size": 4, "logging_steps": 1,
        "num_train_epochs": 2, "max_grad_norm": TEXTS.max_grad_norm, "save_steps": 2,
        "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    model = model or language_model()
    optimizer = OPTIMIZERS[TEXTS.optimizer](model.parameters(), TEXTS.lr)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    return (cls or with_own_loss(None))(
        model, Seq2SeqTrainingArguments(str(folder), **settings | changes),
        train_dataset=texts(), eval_dataset=texts()[:10], optimizers=(optimizer, decay),
        callbacks=callbacks, compute_loss_func=compute_loss_func, trace=TEXTS.trace,
        rule=TEXTS.rule, ref_batchsize=TEXTS.ref_batchsize, on_end=on_end,
    )  # fmt: skip


def run(rank: int, folder: str, kind=None, at=None, **changes: Any) -> dict[str, Any]:
    """Trains from the newest whole checkpoint on; returns weights, samples and logs.

    ``at`` has by rank after which step the process sends itself which signal.
    """
    import_torchvision()  # in a new process
    from transformers import TrainerCallback

    class Signal(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            step, number = (at or {}).get(rank, (None, 0))
            if state.global_step == step:
                os.kill(os.getpid(), number)

    changes["eval_strategy"] = "no" if kind else "epoch"
    trainer = trainer_of(folder, with_own_loss(kind), [Signal()], **changes)
    own, seen = trainer.training_step, []

    def training_step(model, inputs, *given):
        rows = [row for each in inputs for row in each["input_ids"].tolist()]
        seen.append((trainer.state.global_step, rows))
        return own(model, inputs, *given)

    trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=trainer.last_checkpoint())
    return {
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "seen": seen,
        "logs": trainer.state.log_history,
    }
