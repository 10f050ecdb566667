"""The colours of every figure: one for each kind of byte, and the phases borrow theirs.

Chosen so that any two differ by at least 10 in 100 × OKLab distance in normal vision and with simulated protanopia,
deuteranopia and tritanopia (a test holds it), on light and on dark ground.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.trace import CATEGORIES

TRANSIENT = "transient"

# From the bottom of a stacked chart to its top.
LAYERS = (*CATEGORIES, TRANSIENT)

LAYER_TITLES = {
    "base": "base and resident weights",
    "weights": "moved weights",
    "activations": "kept activations",
    "saved": "saved for backward",
    "recomputed": "recomputed",
    "in flight": "in flight",
    "gradients": "gradients",
    "transient": "transient",
}


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of one ground, as `#rrggbb`."""

    ground: str
    ink: str
    layers: dict[str, str]

    @property
    def phases(self) -> dict[str, str]:
        """What compute and copies are drawn in: the colour of the bytes that they make."""
        return {
            "forward": self.layers["saved"],
            "recompute": self.layers["recomputed"],
            "backward": self.layers["gradients"],
            "copy": self.layers["in flight"],
        }


LIGHT = Theme(
    ground="#ffffff",
    ink="#16212b",
    layers={
        "base": "#9ba1a8",
        "weights": "#6c7177",
        "activations": "#2fa8f4",
        "saved": "#2b70e8",
        "recomputed": "#e5a021",
        "in flight": "#861682",
        "gradients": "#045a34",
        "transient": "#c8621b",
    },
)
DARK = Theme(
    ground="#11181f",
    ink="#e4eaef",
    layers={
        "base": "#5f656c",
        "weights": "#b9bec5",
        "activations": "#3aacf8",
        "saved": "#2471e6",
        "recomputed": "#f7b338",
        "in flight": "#c074ab",
        "gradients": "#97f2bd",
        "transient": "#e8622a",
    },
)
