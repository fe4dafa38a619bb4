"""A guess, taken and locked before the measurement is seen."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import ipywidgets


class Predict:
    """A question that takes one guess; made by `predict`. `guess` is None until one is locked."""

    def __init__(
        self, question: str, options: Sequence[str] | tuple[float, float], unit: str
    ) -> None:
        self.question, self.unit = question, unit
        self.guess: str | float | None = None
        self.options = list(options)
        if all(isinstance(option, str) for option in options):
            self.choice = ipywidgets.RadioButtons(
                options=self.options,
                value=None,
                description="guess",
                layout={"width": "max-content"},
            )
        else:
            low, high = (float(end) for end in options)
            self.choice = ipywidgets.FloatSlider(
                value=low,
                min=low,
                max=high,
                step=(high - low) / 100,
                description="guess",
                readout_format=".2f",
                continuous_update=False,
                layout={"width": "34em"},
            )
        self.button = ipywidgets.Button(
            description="Lock my guess", tooltip="Keep this guess; it can't be changed afterwards"
        )
        self.button.on_click(lambda _: self._lock_choice())
        self.status = ipywidgets.HTML()
        text = ipywidgets.HTML(f"<b>{html.escape(question)}</b>")
        self.view = ipywidgets.VBox(
            [text, self.choice, ipywidgets.HBox([self.button, self.status])]
        )

    def _lock_choice(self) -> None:
        try:
            self.lock(self.choice.value)
        except ValueError as error:
            self._say(str(error))

    def lock(self, guess: str | float | None) -> None:
        """Keeps `guess`, as the button does.

        Raises ValueError for what is no option or out of range, and once a guess is locked.
        """
        if self.guess is not None:
            raise ValueError(f"the guess is locked: {self._named(self.guess)}")
        if isinstance(self.choice, ipywidgets.RadioButtons):
            if guess not in self.options:
                raise ValueError(f"choose one of: {', '.join(map(str, self.options))}")
        elif not isinstance(guess, int | float) or not self.choice.min <= guess <= self.choice.max:
            raise ValueError(f"give a number from {self.choice.min:g} to {self.choice.max:g}")
        self.choice.value = self.guess = guess
        self.choice.disabled = self.button.disabled = True
        self._say(f"Locked: {self._named(self.choice.value)}")

    def beside(self, answer: str | float) -> str:
        """One line with the guess and the answer; without a guess, the answer alone."""
        if self.guess is None:
            return f"{self.question} {self._named(answer)} (no guess was locked)"
        guess, right = self._named(self.guess), self._named(answer)
        if isinstance(answer, str):  # a sentence of its own, such as "it halves"
            return f"{self.question} You guessed: {guess}. The answer: {right}."
        return f"{self.question} You guessed {guess}; it is {right}."

    def _named(self, value: str | float) -> str:
        return (
            value if isinstance(value, str) else f"{value:.2f}{' ' if self.unit else ''}{self.unit}"
        )

    def _say(self, text: str) -> None:
        self.status.value = f'<span role="status">{html.escape(text)}</span>'

    def __repr__(self) -> str:
        if isinstance(self.choice, ipywidgets.RadioButtons):
            return "\n".join([self.question, *(f"  ( ) {option}" for option in self.options)])
        low, high = self.options
        return f"{self.question}\n  a number from {self._named(low)} to {self._named(high)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {**(self.view._repr_mimebundle_() or {}), "text/plain": repr(self)}


def predict(
    question: str, options: Sequence[str] | tuple[float, float], *, unit: str = ""
) -> Predict:
    """A question with options to choose from, or a range (low, high) of numbers in `unit`.

    Nothing waits for the guess: "Run All" goes on, and `guess` stays None. Raises ValueError for
    fewer than two options and for a range that is empty.
    """
    words = [option for option in options if isinstance(option, str)]
    if len(options) < 2 or (words and len(words) != len(options)):
        raise ValueError(f"predict: options={options!r}: give two or more words, or (low, high)")
    if not words and not (len(options) == 2 and options[0] < options[1]):  # type: ignore[operator]
        raise ValueError(f"predict: options={options!r}: a range is (low, high) with low < high")
    return Predict(question, options, unit)
