"""From a trace to indices: schedule, sampler, orders, blocks, augmentation."""
