"""Layer rules: one file each, in a registry that users extend.

Importing this package registers the rules that come with it.
"""

from per_sample_grad.layers import (
    batch_norm,
    bilinear,
    convolution,
    embedding,
    group_norm,
    instance_norm,
    layer_norm,
    linear,
    multihead_attention,
    prelu,
    rms_norm,
    transposed_convolution,
)
from per_sample_grad.layers.registry import (
    RULES,
    Rule,
    register_rule,
    rule_of,
    why_no_rule,
)

__all__ = [
    "RULES",
    "Rule",
    "batch_norm",
    "bilinear",
    "convolution",
    "embedding",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "multihead_attention",
    "prelu",
    "register_rule",
    "rms_norm",
    "rule_of",
    "transposed_convolution",
    "why_no_rule",
]
