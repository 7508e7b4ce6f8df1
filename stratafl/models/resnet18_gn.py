"""The residual network of the experiments on CIFAR-100."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from stratafl.base.errors import InvalidInput
from stratafl.models.registry import Shape, image_shape, register


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                nn.GroupNorm(groups, channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


@register(example=((3, 32, 32), 100))
def resnet18_gn(input_shape: Shape, classes: int, groups: int = 2) -> nn.Module:
    """ResNet-18 with group normalisation and the ImageNet stem."""
    channels, _, _ = image_shape("resnet18_gn", input_shape, least=8)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or 64 % groups:
        raise InvalidInput("groups", groups, "must be a divisor of 64")
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        nn.GroupNorm(groups, 64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(before, width, stride, groups), Block(width, width, 1, groups)]
        before = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
