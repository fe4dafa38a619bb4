"""One row of the table of savings: a lesson shows it, `memlab run` collects it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memlab.experiments.recipe import Recipe
from memlab.experiments.rules import IN_PAIRS, second_model
from memlab.experiments.trainer_batches import last_rows

if TYPE_CHECKING:
    from memlab.experiments.measuring import Comparison

ROW_TYPE = "application/vnd.memlab.row+json"
SEEN = 5_000_000  # bytes: less is no difference in two decimals of a GB


@dataclass(frozen=True)
class Row:
    """What a technique saves: metered peaks in bytes, which are the same on every device.

    Over both before sides where they differ: everything off, and TRL's defaults. `price` is a
    recorded reading of a card, labelled as such ("+8 % (H200, recorded)"), or None. `setting` is
    the data set and the batch of the before side, `growth` what a step holds more of where the
    technique costs memory; both are in words, and None where they are not known.
    """

    technique: str
    off_bytes: int | None = None
    defaults_bytes: int | None = None
    after_bytes: int | None = None
    after_defaults_bytes: int | None = None
    price: str | None = None
    setting: str | None = None
    growth: str | None = None

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
        before, after = over_off.before_recipe, over_off.after_recipe
        grows = any(
            c.after.metered_peak_bytes - c.before.metered_peak_bytes > SEEN
            for c in (over_off, over_defaults)
            if c
        )
        row = cls(
            technique,
            off_bytes=over_off.before.metered_peak_bytes,
            after_bytes=over_off.after.metered_peak_bytes,
            price=price,
            setting=_setting(before),
            growth=(_growth(before, after) or None) if grows else None,
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


def _setting(recipe: Recipe) -> str:
    """ "docstrings, 4 x 1024": the data set, the batch and max_length; the model before it, where
    it is not the default one."""
    model = "" if recipe.model == Recipe.model else f"{recipe.model}, "
    length = recipe.max_length or "uncut"
    return f"{model}{recipe.dataset}, {recipe.per_device_train_batch_size} x {length}"


def _growth(before: Recipe, after: Recipe) -> str:
    """What a step of `after` holds more of; "" where it is none of what is known here."""
    batches = [last_rows(recipe) for recipe in (before, after)]
    slots, after_slots = (sum(b.rows * b.slots for b in step) for step in batches)
    tokens, after_tokens = (sum(sum(b.documents) for b in step) for step in batches)
    said = []
    if after_tokens > tokens:
        paired = after.trainer in IN_PAIRS and before.trainer not in IN_PAIRS
        pairs = " (both rows of each pair)" if paired else ""
        said.append(f"{tokens:,} -> {after_tokens:,} useful tokens a step{pairs}")
    elif after_slots > slots:
        said.append(f"{slots:,} -> {after_slots:,} slots a step for the same tokens")
    if (second := second_model(after)) and not second_model(before):
        said.append(f"a {second} model beside the trained one")
    if after.gradient_accumulation_steps > before.gradient_accumulation_steps:
        said.append("gradients kept from one micro-batch to the next")
    return " and ".join(said)
