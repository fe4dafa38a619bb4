"""How figures look: Okabe and Ito's colours (jfly.uni-koeln.de/color), hatches, numbers."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.instruments.amounts import GB

INK = "#222222"
QUIET = "#6b6b6b"
FAINT = "#d9d9d9"
HATCH = (1.0, 1.0, 1.0, 0.5)  # half-transparent white: seen, yet quieter than the colours
FONT = 9.0  # points; every text in a figure is this size or one point off


@dataclass(frozen=True)
class Look:
    """How one category is drawn. `hatch` tells it apart where colours cannot."""

    name: str
    colour: str
    hatch: str
    ink: str  # colour of text written on it


LOOKS = {
    "parameters": Look("parameters", "#0072B2", "", "white"),
    "gradients": Look("gradients", "#E69F00", "////", INK),
    "optimizer_state": Look("optimizer state", "#009E73", "\\\\\\\\", "white"),
    "activations": Look("activations", "#56B4E9", "...", INK),
    "logits": Look("logits", "#D55E00", "xxx", "white"),
    "kv_cache": Look("KV cache", "#CC79A7", "+++", INK),
    "temporaries": Look("temporaries", "#BBBBBB", "---", INK),
}

KEPT = Look("kept", "#0072B2", "", "white")
LOST = Look("lost", "#D55E00", "////", "white")
PADDING = Look("padding", "#e2e2e2", "////", QUIET)
CURRENT = "#D55E00"  # where the slider stands
PADDING_HATCH = "#b0b0b0"
GOAL = "#007a5a"  # a chosen limit or share, and what meets it
DOCUMENTS = (  # (colour, ink on it): documents side by side take them in turn
    ("#0072B2", "white"),
    ("#E69F00", INK),
    ("#009E73", "white"),
    ("#56B4E9", INK),
    ("#CC79A7", INK),
    ("#F0E442", INK),
)

PHASES = {  # phase -> (colour of its band, colour of its name)
    "setup": ("#f4f4f4", INK),
    "rollout": ("#efe3ea", INK),
    "reference": ("#c9d6e2", INK),
    "forward": ("#e3e3e3", INK),
    "backward": ("#a9a9a9", INK),
    "optimizer": ("#555555", "white"),
}


def phase_look(phase: str) -> tuple[str, str]:
    """Colour of a phase's band and of text on it."""
    return PHASES.get(phase, ("#c9d6e2", INK))


def gb(n: float, *, unit: bool = True) -> str:
    """Bytes in GB (1e9 bytes), two decimals: 19790000000 -> "19.79 GB"."""
    return GB.of(n) + (" GB" if unit else "")


def change(before: int, after: int) -> str:
    """The change from `before` to `after` in bytes as GB and percent: "-14.39 GB (-73 %)"."""
    share = f" ({(after - before) / before:+.0%})".replace("%", " %") if before else ""
    return f"{(after - before) / 1e9:+.2f} GB{share}".replace("-", "\N{MINUS SIGN}")
