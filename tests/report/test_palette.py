from __future__ import annotations

import itertools

import numpy as np
import pytest

from lowtide.report.palette import DARK, LAYER_TITLES, LAYERS, LIGHT

# Machado, Oliveira, Fernandes 2009, severity 1.0, on linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
# Ottosson 2020, OKLab from linear RGB.
TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(colour):
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def seen(colour, vision):
    return 100 * TO_LAB @ np.cbrt(TO_CONES @ np.clip(VISIONS[vision] @ linear(colour), 0, 1))


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_any_two_layers_can_be_told_apart(theme, vision):
    for one, other in itertools.combinations(LAYERS, 2):
        distance = np.linalg.norm(seen(theme.layers[one], vision) - seen(theme.layers[other], vision))
        assert distance >= 10, f"{one} and {other}: {distance:.1f}"


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_layers_stand_out_from_the_ground(theme):
    ground = linear(theme.ground) @ [0.2126, 0.7152, 0.0722]
    for name, colour in theme.layers.items():
        luminance = linear(colour) @ [0.2126, 0.7152, 0.0722]
        low, high = sorted((ground, luminance))
        assert (high + 0.05) / (low + 0.05) >= 2.2, name


def test_every_layer_has_a_colour_and_a_title():
    assert set(LIGHT.layers) == set(DARK.layers) == set(LAYER_TITLES) == set(LAYERS)
