"""Models in which data decide where rows go: images among the tokens of a text."""

from __future__ import annotations

import pytest
import torch
from support.outside import package
from torch.nn.utils import get_total_norm

import per_sample_grad as psg
from tools.outside import models

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]

IMAGE, PATCHES, TOKENS = 60, 4, 14


def llava() -> torch.nn.Module:
    models.import_torchvision()
    transformers = package("transformers")
    text = {**models.SMALL, "max_position_embeddings": 64, "num_key_value_heads": 2}
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 8,
        "projection_dim": 32,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**text),
        image_token_id=IMAGE,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).double().eval()


def batch(images_of: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids, with places for so many images each, and all images."""
    ids = torch.randint(4, IMAGE, (len(images_of), TOKENS))
    for row, number in enumerate(images_of):
        ids[row, : number * PATCHES] = IMAGE
    pixels = torch.randn(sum(images_of), 3, 16, 16, dtype=torch.float64)
    return ids, pixels


def losses_of(model, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, pixel_values=pixels).logits
    return psg.token_cross_entropy(logits[:, -4:-1], ids[:, -3:])


def test_images_among_tokens_are_right_or_refused():
    model = llava()
    params = [param for param in model.parameters() if param.requires_grad]
    seen = []
    for images_of in ([1, 1], [1, 1], [2, 0], [0, 2], [1, 1]):
        torch.manual_seed(len(seen))
        ids, pixels = batch(images_of)
        expected = []
        for loss in losses_of(model, ids, pixels):
            options = {"retain_graph": True, "allow_unused": True}
            grads = torch.autograd.grad(loss, params, **options)
            expected.append(get_total_norm([g for g in grads if g is not None]))
        with psg.capture(model) as recorded:
            losses = losses_of(model, ids, pixels)
        try:
            norms = recorded.norms(losses)
        except psg.CouplingError:
            seen.append("refused")
            continue
        torch.testing.assert_close(norms, torch.stack(expected), rtol=1e-5, atol=0)
        seen.append("right")
    assert seen == ["right", "right", "refused", "refused", "right"]
