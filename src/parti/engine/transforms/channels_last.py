"""Images in channels-last order through convolutional models.

oneDNN's convolutions, and even more torch's max-pooling, are faster on CPU when the channels of a
pixel lie together. Only activations change their order: each convolution takes its input in
channels-last, and what follows keeps it. Weights stay as they are. oneDNN reorders them in either
case, and weights in another order have a price that users pay: `safetensors` and `.view(-1)` refuse
them, and fused optimizers on CPU silently mix up elements where state and weight differ in order.
What leaves a model is put back in the default order, for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from parti.engine.transforms.calls import image_ends, is_image
from parti.engine.transforms.change import Change, Effect, Patch, each_module, is_plain


def lay_out_channels_last(models: Sequence[nn.Module]) -> Change | None:
    """Channels-last for every 2-D convolution, where nothing in the models stands against it."""
    modules = list(each_module(models))
    convolutions = [each for each in modules if is_plain(each, nn.Conv2d)]
    if not convolutions or any(isinstance(each, _AGAINST) for each in modules):
        return None
    patches = [Patch(each, "forward", conv2d_forward) for each in convolutions]
    for module in modules:
        for kind, function in _OTHERS.items():
            if is_plain(module, kind):
                patches.append(Patch(module, "forward", function))
    patches += [Patch(each, "_call_impl", call_impl) for each in models]
    number = len(convolutions)
    return Change(
        note=f"channels_last ({number} convolution{'s' * (number != 1)})",
        effect=Effect.ROUNDING,
        patches=tuple(patches),
    )


_AGAINST = (
    nn.modules.instancenorm._InstanceNorm,
    nn.LocalResponseNorm,
    nn.modules.lazy.LazyModuleMixin,
)
"""Normalisations without a channels-last form of their own, and modules without weights yet."""


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """The same images with the channels of a pixel together in memory."""
    if images.dim() != 4:
        return images
    if images.shape[1] == 1 and images.is_contiguous():
        # With one channel both orders are the same bytes. torch takes such a tensor for the default
        # order and goes on in it, unless the strides say otherwise.
        number, _, height, width = images.shape
        return images.view(number, height, width, 1).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


def conv2d_forward(self: nn.Conv2d, input: Any) -> Any:
    return nn.Conv2d.forward(self, channels_last(input))


def conv_transpose2d_forward(
    self: nn.ConvTranspose2d, input: Any, *args: Any, **kwargs: Any
) -> Any:
    return nn.ConvTranspose2d.forward(self, channels_last(input), *args, **kwargs)


def flatten_forward(self: nn.Flatten, input: Any) -> Any:
    return nn.Flatten.forward(self, image_ends(input))


def adaptive_avg_pool2d_forward(self: nn.AdaptiveAvgPool2d, input: Any) -> Any:
    return nn.AdaptiveAvgPool2d.forward(self, image_ends(input))


def call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of a whole model."""
    result = type(self)._call_impl(self, *args, **kwargs)  # type: ignore[no-untyped-call]
    return tree_map_only(torch.Tensor, in_default_order, result)


def in_default_order(tensor: torch.Tensor) -> torch.Tensor:
    return image_ends(tensor).contiguous() if is_image(tensor) else tensor


_OTHERS: dict[type[nn.Module], Any] = {
    nn.ConvTranspose2d: conv_transpose2d_forward,
    nn.Flatten: flatten_forward,
    nn.AdaptiveAvgPool2d: adaptive_avg_pool2d_forward,
}

# A pickled module finds its class's own method under this name.
for _function in (conv2d_forward, *_OTHERS.values()):
    _function.__name__ = "forward"
call_impl.__name__ = "_call_impl"
