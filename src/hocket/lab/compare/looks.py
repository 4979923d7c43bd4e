"""How things look everywhere: colours for light and dark, and for each strategy its colour, marker and dashes."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.lab.compare import amounts
from hocket.lab.compare.results import Comparison, Contender


@dataclass(frozen=True)
class Tone:
    """One colour by its role: in light (and on paper), and in dark."""

    light: str
    dark: str


# Okabe and Ito's colours (2008), which the colour-blind tell apart, without the yellow that white paper swallows; the
# darker ones are lighter on dark ground.
STRATEGY_TONES = {
    "blue": Tone("#0072b2", "#3f9fdb"),
    "vermilion": Tone("#d55e00", "#ef7a1f"),
    "green": Tone("#009e73", "#18b98b"),
    "purple": Tone("#cc79a7", "#d98fb8"),
    "orange": Tone("#e69f00", "#f2b632"),
    "sky": Tone("#56b4e9", "#8cd0f7"),
}
TONES = {
    "paper": Tone("#ffffff", "#15181d"),
    "ink": Tone("#1b1f24", "#e8eaed"),
    "soft": Tone("#555d68", "#a9b1bc"),  # axes, captions
    "bad": Tone("#a8261b", "#ff9a8f"),
    "grid": Tone("#dfe3e8", "#333942"),
    "compute": Tone("#4b5b70", "#8fa1b8"),
    "communication": Tone("#9db1ca", "#566a85"),
    "waiting": Tone("#e6ecf3", "#2a323d"),
    **STRATEGY_TONES,
}
PARTS = {"compute": "", "communication": "////", "waiting": "...."}  # of a run's time, and the pattern of each
LIGHT = {name: tone.light for name, tone in TONES.items()}
# Colours that nobody uses: in the SVG each becomes the variable of the style sheet that follows light and dark.
VARIABLES = {name: f"#abcd{number:02x}" for number, name in enumerate(TONES, start=16)}

_MARKERS = "sD^vPX<>*"
_HATCHES = ["", "////", "xxxx", "...."]  # of bars, when all tones have been used so often
_DASHES: list[tuple[float, ...]] = [(), (5, 1.5), (1.5, 1.2), (6, 1.5, 1.5, 1.5), (3, 1), (6, 1, 1, 1, 1, 1)]


@dataclass(frozen=True)
class Look:
    """How one strategy is drawn: the name of its tone, marker, dashes (none: no gaps), and the pattern of its bars."""

    tone: str
    marker: str
    dashes: tuple[float, ...]
    hatch: str = ""


BASELINE = Look("ink", "o", ())


class Looks:
    """The look of each strategy of a comparison, the same in all its pictures."""

    def __init__(self, comparison: Comparison) -> None:
        tones = list(STRATEGY_TONES)
        names = dict.fromkeys(entry.strategy for entry in comparison.entries if entry.workers > 1)
        self._looks = {
            name: Look(
                tones[number % len(tones)],
                _MARKERS[number % len(_MARKERS)],
                _DASHES[(number + number // len(tones)) % len(_DASHES)],
                _HATCHES[number // len(tones) % len(_HATCHES)],
            )
            for number, name in enumerate(names)
        }

    def of(self, entry: Contender) -> Look:
        """One worker has the ink's colour, whatever its strategy is called."""
        return BASELINE if entry.workers == 1 else self._looks[entry.strategy]

    def of_strategy(self, strategy: str) -> Look:
        """The look of a strategy on more than one worker."""
        return self._looks[strategy]


def short(name: str, most: int = 44) -> str:
    """``name``, cut in the middle if it is longer, in one line: the end says on how many workers."""
    name = amounts.line(name)
    if len(name) <= most:
        return name
    return f"{name[: most - 12]}…{name[-11:]}"
