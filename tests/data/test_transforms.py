"""Image transforms: stated results, zero fill, and stacked clients equal to single ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stratafl.base.errors import InvalidInput
from stratafl.data.partition.partition import leaf_angles
from stratafl.data.transforms import channels_first, flip_and_crop, normalise, rotate


def pixels(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_normalise_centres_each_channel():
    images, mean, std = pixels(4, 3, 5, 5), (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
    result = normalise(images, mean, std)
    assert result.dtype == torch.float32
    for c in range(3):
        expected = (images[:, c].double() / 255 - mean[c]) / std[c]
        torch.testing.assert_close(result[:, c].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(normalise(images.expand(2, 4, 3, 5, 5), mean, std)[1], result)
    with pytest.raises(InvalidInput, match=r"mean = .*one value per channel, 3"):
        normalise(images, (0.5,), std)


def test_channels_first():
    assert channels_first(pixels(2, 4, 5)).shape == (2, 1, 4, 5)
    images = pixels(2, 4, 5, 3)
    assert torch.equal(channels_first(images)[1, 2], images[1, :, :, 2])


def test_stacked_clients_get_what_they_would_get_alone():
    images = normalise(pixels(5, 7, 3, 9, 8), (0.5,) * 3, (0.2,) * 3)
    clients, steps = torch.tensor([3, 0, 11, 4, 900]), torch.tensor([5, 5, 6, 5, 0])
    stacked = flip_and_crop(images, 42, clients, steps)
    for row, (client, step) in enumerate(zip(clients.tolist(), steps.tolist(), strict=True)):
        assert torch.equal(stacked[row], flip_and_crop(images[row], 42, client, step))
    part = flip_and_crop(images[2:4], 42, clients[2:4], steps[2:4])
    assert torch.equal(stacked[2:4], part)
    same_step = flip_and_crop(images, 42, clients, 5)
    assert torch.equal(same_step[0], stacked[0]) and not torch.equal(same_step[2], stacked[2])


def test_flip_and_crop_has_the_stated_outcomes():
    size, pad, count = 6, 4, 6000
    image = torch.arange(1.0, size * size + 1).reshape(1, size, size)
    padded = torch.nn.functional.pad(image, (pad,) * 4)
    mirrored = torch.nn.functional.pad(image.flip(-1), (pad,) * 4)
    outcomes = {}
    for flipped, source in enumerate((padded, mirrored)):
        for y in range(2 * pad + 1):
            for x in range(2 * pad + 1):
                window = source[:, y : y + size, x : x + size]
                outcomes[window.numpy().tobytes()] = (flipped, y, x)
    results = flip_and_crop(image.expand(count, 1, size, size), 0, 1, 2, pad)
    seen = np.array([outcomes[result.numpy().tobytes()] for result in results])
    flips, offsets = seen[:, 0], seen[:, 1:]
    assert abs(flips.mean() - 0.5) < 0.03
    still = (offsets == pad).all(axis=1).mean()
    assert abs(still - (0.5 + 0.5 / 81)) < 0.03
    moved = offsets[(offsets != pad).any(axis=1)]
    for axis in (0, 1):
        frequency = np.bincount(moved[:, axis], minlength=9) / len(moved)
        assert np.abs(frequency - 1 / 9).max() < 0.03
    assert abs(np.corrcoef(flips, (offsets == pad).all(axis=1))[0, 1]) < 0.05


def test_draws_depend_on_every_part_of_the_key():
    images = normalise(pixels(16, 1, 8, 8), (0.5,), (0.2,))
    base = flip_and_crop(images, 1, 2, 3)
    assert torch.equal(base, flip_and_crop(images, 1, 2, 3))
    for seed, client, step in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(base, flip_and_crop(images, seed, client, step))


def test_quarter_turns_are_exact():
    grey, colour = pixels(3, 8, 8), pixels(3, 8, 8, 3)
    for images in (grey, colour):
        assert torch.equal(rotate(images, 0), images)
        assert torch.equal(rotate(images, 90.0), images.rot90(1, (1, 2)))
        assert torch.equal(rotate(images, -90.0), images.rot90(-1, (1, 2)))
    mixed = rotate(grey, torch.tensor([0.0, 90.0, 180.0]))
    assert torch.equal(mixed[1], grey[1].rot90(1)) and torch.equal(mixed[2], grey[2].flip(0, 1))


def test_a_turn_keeps_the_centre_and_blackens_the_corners():
    images = torch.full((1, 21, 41), 200, dtype=torch.uint8)
    turned = rotate(images, 45.0)[0]
    assert turned[10, 20] == 200 and turned[0, 0] == 0 and turned[-1, -1] == 0
    line = torch.zeros(1, 31, 31, dtype=torch.uint8)
    line[0, 15, 16:] = 255
    tilted = rotate(line, 30.0)[0].float()
    rows, columns = torch.nonzero(tilted > 100, as_tuple=True)
    slope = ((15 - rows.float()) / (columns.float() - 15).clamp(min=1)).median()
    assert abs(slope.item() - np.tan(np.pi / 6)) < 0.1
    with pytest.raises(InvalidInput, match=r"images = .*must be uint8"):
        rotate(line.float(), 3.0)


def test_angles_by_group_at_any_level():
    parents = [np.empty(0, int), np.array([0, 0]), np.array([0, 0, 1]), np.array([0, 1, 1, 2])]
    assert leaf_angles(parents).tolist() == [-50, -50, -50, -40]
    assert leaf_angles(parents, start=0, step=5, level=2).tolist() == [0, 5, 5, 10]
    with pytest.raises(InvalidInput, match=r"rotation.level = 4"):
        leaf_angles(parents, level=4)
