"""Training states on disk: atomic, verified, written in the background and in parts.

Modules that look at checkpoints without reading tensors do not import torch.
"""
