"""Shapes of ResNet-50's weights, so that torchvision need not be installed."""

import torch

from tools.references.resnet50 import resnet50

with torch.device("meta"):
    RESNET50_WEIGHTS = {
        name: tuple(parameter.shape)
        for name, parameter in resnet50().named_parameters()
        if parameter.dim() > 1
    }
