"""Small models of transformers, timm and torchvision, with random weights.

Nothing is downloaded: a model is its architecture with a tiny configuration. Each comes
with a batch of three samples and a loss of each sample, in evaluation mode, so that a
sample's loss does not depend on the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import per_sample_grad as psg

BATCH_SIZE, NUM_TOKENS, NUM_CLASSES, VOCABULARY = 3, 9, 5, 64


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with random weights, and how it is trained.

    Attributes:
        make: Returns the model.
        batch: Returns tensors ``(BATCH_SIZE, ...)``, always the same.
        losses: ``losses(model, *batch)`` returns one number per sample, ``(B,)``.
        options: What `psg.capture` must be told of the model.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    losses: Callable[..., torch.Tensor]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def built(self, dtype: torch.dtype) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """Returns the model, always with the same weights, and the batch."""
        torch.manual_seed(0)
        batch = (x.to(dtype) if x.is_floating_point() else x for x in self.batch())
        return self.make().eval().to(dtype), tuple(batch)


# --- batches and losses ---------------------------------------------------------------


def tokens() -> tuple[torch.Tensor, ...]:
    """Returns token ids ``(B, T)`` and classes ``(B,)``."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (BATCH_SIZE, NUM_TOKENS), generator=generator)
    return ids, torch.arange(BATCH_SIZE)


def images(size: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Returns a function that returns images ``(B, 3, size, size)`` and classes."""

    def batch() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        pixels = torch.randn(BATCH_SIZE, 3, size, size, generator=generator)
        return pixels, torch.arange(BATCH_SIZE)

    return batch


def sound() -> tuple[torch.Tensor, ...]:
    """Returns waveforms ``(B, 600)`` and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH_SIZE, 600, generator=generator), torch.arange(BATCH_SIZE)


def of_next_tokens(model: nn.Module, ids: torch.Tensor, _: torch.Tensor) -> Any:
    """The mean loss of each sample's next tokens."""
    return psg.token_cross_entropy(model(input_ids=ids).logits[:, :-1], ids[:, 1:])


def of_translation(model: nn.Module, ids: torch.Tensor, _: torch.Tensor) -> Any:
    """The same of a decoder that also sees an encoder's output."""
    logits = model(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
    return psg.token_cross_entropy(logits[:, :-1], ids.flip(1)[:, 1:])


def of_classes(model: nn.Module, inputs: torch.Tensor, classes: torch.Tensor) -> Any:
    """The cross entropy of each sample's class."""
    found = model(inputs)
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return F.cross_entropy(logits, classes, reduction="none")


def import_torchvision() -> None:
    """Imports torchvision if it is there, also one built for CUDA on a torch for CPUs.

    The operators of such a build do not load, and importing it fails at the first of
    them, which image classifiers do not use; the other libraries import torchvision.
    """
    try:
        import torchvision
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor b, Tensor s) -> Tensor"
            )
        import torchvision  # noqa: F401


# --- Hugging Face ---------------------------------------------------------------------

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": NUM_CLASSES,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
# What each architecture needs beside SMALL, by the name of its configuration.
DECODERS: dict[str, dict[str, Any]] = {
    "biogpt": {},
    "bloom": {},
    "codegen": {"rotary_dim": 4},
    "cohere": {"num_key_value_heads": 2},
    "falcon": {},
    "gemma": GROUPED,
    "gemma2": GROUPED,
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "granite": {"num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2},
    "mamba": {"state_size": 4},
    "mistral": {"num_key_value_heads": 2},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "mpt": {},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": GROUPED,
    "stablelm": {"num_key_value_heads": 4},
    "starcoder2": {"num_key_value_heads": 2},
    "xglm": {"ffn_dim": 48},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bert": {},
    "deberta-v2": {
        "pos_att_type": ["c2p", "p2c"],
        "relative_attention": True,
        "position_buckets": 8,
    },
    "distilbert": {"hidden_dim": 48},
    "electra": {"embedding_size": 16},
    "fnet": {},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2},
    "mpnet": {},
    "roberta": {},
    "roformer": {"embedding_size": 32},
    "squeezebert": {"embedding_size": 32},
    "xlnet": {"d_inner": 48, "d_head": 8},
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "bart": {},
    "pegasus": {},
    "t5": {},
}
_TWO_SIDED = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 0,
}
_PATCHES = {
    "image_size": 32,
    "patch_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VISION: dict[str, dict[str, Any]] = {
    "beit": _PATCHES,
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "deit": {**_PATCHES, "architectures": ["DeiTForImageClassification"]},
    "dinov2": _PATCHES,
    "mobilenet_v2": {"depth_multiplier": 0.25, "image_size": 32},
    "poolformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "segformer": {
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
    },
    "swin": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "vit": _PATCHES,
}
_WAVES = {
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
}
# Time comes first within this one, and samples in its head.
OPTIONS: dict[str, dict[str, Any]] = {
    "xlnet": {"batch_dim": {"": 1, "sequence_summary.summary": 0, "logits_proj": 0}},
}


def _configured(architecture: str, head: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    if architecture == "xlnet":  # which has no limit to set
        options = {k: v for k, v in options.items() if not k.startswith("max_position")}
    config = transformers.AutoConfig.for_model(architecture, **options)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return getattr(transformers, head).from_config(config)


def transformers_cases() -> dict[str, Case]:
    """Returns the cases of Hugging Face's transformers, by name."""

    import_torchvision()

    def cases(
        table: dict[str, dict[str, Any]],
        head: str,
        common: dict[str, Any],
        batch: Callable[[], tuple[torch.Tensor, ...]],
        losses: Callable[..., torch.Tensor],
    ) -> dict[str, Case]:
        return {
            name: Case(
                lambda name=name, own=own: _configured(name, head, {**common, **own}),
                batch,
                losses,
                OPTIONS.get(name, {}),
            )
            for name, own in table.items()
        }

    pixels = {key: SMALL[key] for key in ("hidden_size", "intermediate_size")}
    pixels |= {"num_labels": NUM_CLASSES}
    return {
        **cases(DECODERS, "AutoModelForCausalLM", SMALL, tokens, of_next_tokens),
        **cases(
            ENCODERS, "AutoModelForSequenceClassification", SMALL, tokens, of_classes
        ),
        **cases(
            ENCODER_DECODERS,
            "AutoModelForSeq2SeqLM",
            SMALL | _TWO_SIDED,
            tokens,
            of_translation,
        ),
        **cases(
            VISION, "AutoModelForImageClassification", pixels, images(32), of_classes
        ),
        **cases(
            {"wav2vec2": _WAVES},
            "AutoModelForAudioClassification",
            SMALL,
            sound,
            of_classes,
        ),
    }


# --- timm -----------------------------------------------------------------------------


def timm_cases() -> dict[str, Case]:
    """Returns timm's own small models, those it calls ``test_*``, by name."""
    import_torchvision()
    import timm

    return {
        name: Case(
            lambda name=name: timm.create_model(name, num_classes=NUM_CLASSES),
            images(timm.get_pretrained_cfg(name).input_size[-1]),
            of_classes,
        )
        for name in timm.list_models("test_*")
    }


# --- torchvision ----------------------------------------------------------------------

TORCHVISION = (
    "densenet121", "efficientnet_b0", "mnasnet0_5", "mobilenet_v2",
    "mobilenet_v3_small", "regnet_x_400mf", "resnet18", "shufflenet_v2_x0_5",
    "squeezenet1_1",
)  # fmt: skip


def torchvision_cases() -> dict[str, Case]:
    """Returns image classifiers of torchvision, by name; the last three are smaller."""
    import_torchvision()
    from torchvision import models
    from torchvision.models.convnext import CNBlockConfig

    makers = {name: getattr(models, name) for name in TORCHVISION}
    blocks = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)]
    makers["convnext"] = lambda **options: models.ConvNeXt(blocks, **options)
    makers["swin_transformer"] = lambda **options: models.SwinTransformer(
        [4, 4], 8, [1, 1], [2, 2], [4, 4], **options
    )
    makers["vision_transformer"] = lambda **options: models.VisionTransformer(
        64, 16, 2, 4, 32, 48, **options
    )
    return {
        name: Case(
            lambda maker=maker: maker(num_classes=NUM_CLASSES), images(64), of_classes
        )
        for name, maker in makers.items()
    }


LIBRARIES: dict[str, Callable[[], dict[str, Case]]] = {
    "transformers": transformers_cases,
    "timm": timm_cases,
    "torchvision": torchvision_cases,
}
