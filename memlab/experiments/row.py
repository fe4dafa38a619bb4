"""One row of the table of savings: a lesson shows it, `memlab run` collects it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memlab.experiments.measuring import Comparison

ROW_TYPE = "application/vnd.memlab.row+json"


@dataclass(frozen=True)
class Row:
    """What a technique saves: metered peaks in bytes, which are the same on every device.

    Over both before sides where they differ: everything off, and TRL's defaults. `price` is a
    recorded reading of a card, labelled as such ("+8 % (H200, recorded)"), or None.
    """

    technique: str
    off_bytes: int | None = None
    defaults_bytes: int | None = None
    after_bytes: int | None = None
    after_defaults_bytes: int | None = None
    price: str | None = None

    @classmethod
    def of(
        cls,
        technique: str,
        over_off: Comparison,
        over_defaults: Comparison | None = None,
        *,
        price: str | None = None,
    ) -> Row:
        """The row of one or two comparisons; without the second, a technique is on by default."""
        row = cls(
            technique,
            off_bytes=over_off.before.metered_peak_bytes,
            after_bytes=over_off.after.metered_peak_bytes,
            price=price,
        )
        if over_defaults is None:
            return row
        sizes = {
            "defaults_bytes": over_defaults.before.metered_peak_bytes,
            "after_defaults_bytes": over_defaults.after.metered_peak_bytes,
        }
        return cls(**{**asdict(row), **sizes})

    def __str__(self) -> str:
        sides = {
            "everything off": (self.off_bytes, self.after_bytes),
            "TRL's defaults": (self.defaults_bytes, self.after_defaults_bytes),
        }
        said = [
            f"{before / 1e9:.2f} -> {after / 1e9:.2f} GB over {base}"
            for base, (before, after) in sides.items()
            if before is not None and after is not None
        ]
        return f"{self.technique}: " + "; ".join([*said, f"price {self.price or 'not timed'}"])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {ROW_TYPE: asdict(self), "text/plain": str(self)}
