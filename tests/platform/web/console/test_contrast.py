"""The colours of `tokens.css`: contrast of text and edges (WCAG 2.2), and chart series that colour-blind people tell apart."""

import itertools
import math
import re
from typing import Final

import pytest

from loraplex.platform.web.console_app import STATIC

TEXT: Final = {
    "text": "canvas surface raised sunken accent-soft ok-soft warn-soft bad-soft",
    "muted": "canvas surface raised sunken accent-soft",
    "faint": "canvas surface raised sunken",
    "accent": "canvas surface raised accent-soft",
    "ok": "surface canvas ok-soft",
    "warn": "surface canvas warn-soft",
    "bad": "surface canvas raised bad-soft",
    "on-accent": "accent accent-hover bad",
}
"""Text -> what it stands on."""
GRAPHICS: Final = {name: "surface" for name in ("c1", "c2", "c3", "c4", "c5", "c6", "bad")} | {
    "control": "surface canvas raised",
    "accent": "surface canvas raised",
}
# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
SEEN_BY: Final = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
LEAST_DISTANCE: Final = 8.0
"""In Oklab, times 100; about 2 is just noticeable."""


def tokens(theme: str) -> dict[str, str]:
    pairs = re.findall(
        r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", (STATIC / "tokens.css").read_text()
    )
    return {name: light if theme == "light" else dark for name, light, dark in pairs}


def linear(colour: str) -> list[float]:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    light = [
        sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))
        for colour in (one, other)
    ]
    return (max(light) + 0.05) / (min(light) + 0.05)


def oklab(rgb: list[float]) -> tuple[float, float, float]:
    red, green, blue = rgb
    long = max(0.0, 0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = max(0.0, 0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = max(0.0, 0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def distance(one: str, other: str, eyes: str) -> float:
    seen = [
        [
            min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear(colour), strict=True))))
            for row in SEEN_BY[eyes]
        ]
        for colour in (one, other)
    ]
    return 100 * math.dist(oklab(seen[0]), oklab(seen[1]))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("pairs", "bound"), [(TEXT, 4.5), (GRAPHICS, 3.0)])
def test_every_pair_in_use_has_enough_contrast(theme: str, pairs: dict[str, str], bound: float) -> None:
    colours = tokens(theme)
    for name, grounds in pairs.items():
        for ground in grounds.split():
            assert contrast(colours[name], colours[ground]) >= bound, (name, ground)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN_BY)
def test_series_are_told_apart(theme: str, eyes: str) -> None:
    colours = tokens(theme)
    for one, other in itertools.combinations([f"c{number}" for number in range(1, 7)], 2):
        assert distance(colours[one], colours[other], eyes) >= LEAST_DISTANCE, (one, other)
