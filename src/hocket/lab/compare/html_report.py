"""The report: one HTML file with everything in it, which needs no network and no scripts to be read.

``report.html`` is the template: the page, and after it named blocks of which the page is put together. Whatever is
filled in is escaped, unless it is ``Html`` that blocks have made.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from hocket.errors import UsageError
from hocket.lab.compare import amounts, comparison_folder, drawing, pictures, summary, verdict
from hocket.lab.compare.looks import TONES, Looks
from hocket.lab.compare.picture import Picture
from hocket.lab.compare.results import Comparison, Contender

_ROWS = 12  # of one run's curve in the table of numbers; the JSON has all


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def write(comparison: Comparison, folder: Path) -> Path:
    """Writes ``report.html`` into ``folder``, which is made if it is not there; without matplotlib it has no pictures.

    Raises:
        UsageError: The folder cannot be written to.
    """
    path, text = folder / comparison_folder.REPORT, html(comparison)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        comparison_folder.replace_file(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; name another folder") from error
    return path


def html(comparison: Comparison) -> str:
    """The page's text."""
    data = json.dumps(comparison_folder.to_json(comparison), allow_nan=False, separators=(",", ":"))
    facts = {"command": comparison.command, **comparison.about}
    return _fill(
        "page",
        title=f"Comparison of {Path(comparison.script).name}: which strategy is fastest?",
        light=" ".join(f"--{name}: {tone.light};" for name, tone in TONES.items()),
        dark=" ".join(f"--{name}: {tone.dark};" for name, tone in TONES.items()),
        # A number and its unit stay in one line.
        answer=re.sub(r"(\d) (ms|s|min|h|samples/s)\b", "\\1\u00a0\\2", verdict.of(comparison)),
        summary=_summary(comparison),
        failed=_list("Failed", _failures(comparison), "failed"),
        notes=_list("Notes", comparison.notes),
        pictures=_pictures(comparison),
        gradients=_list("Gradients", _gradients(comparison)),
        about=_join(
            _fill("command" if name == "command" else "fact", name=name, text=text)
            for name, text in facts.items()
            if text
        ),
        numbers=_numbers(comparison),
        # No tag can begin in it.
        data=Html(data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")),
    )


@cache
def _blocks() -> dict[str, Template]:
    text = resources.files("hocket.lab.compare").joinpath("report.html").read_text(encoding="utf-8")
    parts = ["page", *re.split(r"<!-- block: (\w+) -->\n", text)]
    return {name: Template(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _fill(block: str, **values: object) -> Html:
    """A block of the template with ``values``."""
    texts = {name: value if isinstance(value, Html) else escape(str(value)) for name, value in values.items()}
    return Html(_blocks()[block].substitute(texts).replace(' class=""', ""))


def _join(parts: Iterable[Html]) -> Html:
    return Html("".join(parts))


def _list(title: str, sentences: Iterable[str], kind: str = "") -> Html:
    items = _join(_fill("item", text=sentence) for sentence in sentences)
    return _fill("list", title=title, kind=kind, items=items) if items else items


def _summary(comparison: Comparison) -> Html:
    columns, rows = summary.of(comparison)
    if not rows:
        return Html()
    best, looks = verdict.winner(comparison), Looks(comparison)
    titles = {column.title for column in columns}
    said = [f"Medians of {comparison.repeats} repeats." if comparison.repeats > 1 else "One run of each."]
    if "× passes" in titles:
        said.append("Time to target = one pass × passes over the data.")
    if "efficiency" in titles:
        said.append("Efficiency is the speed-up for each worker.")
    if any(summary.shares_memory(entry) for entry in comparison.entries):
        said.append("Where 0 B are sent in shared memory, workers read and write the same parameters.")
    heads = [_fill("head", kind="text" if c.is_text else "", about=c.about, title=c.title) for c in columns]
    made = []
    for entry, (name, *texts) in zip(comparison.entries, rows, strict=True):
        look = looks.of(entry)
        mark = f"var(--{look.tone})"
        if look.hatch:
            mark = f"repeating-linear-gradient(45deg, {mark} 0 2px, var(--paper) 2px 3.5px)"
        # A strategy may go on in the next line after its brackets and commas.
        breakable = Html(escape(name).replace("(", "(<wbr>").replace(",", ",<wbr>"))
        kind, cells = "best" if entry is best else "", _join(map(_cell, texts))
        made.append(_fill("row", kind=kind, mark=mark, name=breakable, cells=cells))
    return _fill("summary", heads=_join(heads), rows=_join(made), said=" ".join(said))


def _cell(text: str) -> Html:
    """In one line, or in two, of which the second is small."""
    first, _, second = text.partition("\n")
    return _fill("cell_of_two", first=first, second=second) if second else _fill("cell", first=first)


def _failures(comparison: Comparison) -> Iterable[str]:
    """One line for each reason, with the repeats that it ended."""
    for entry in comparison.entries:
        failures = [result.failure for result in entry.results if result.failure]
        for reason in dict.fromkeys(failures):
            all_of_them = len(entry.results)
            part = f", {failures.count(reason)} of {all_of_them} repeats" if all_of_them > 1 else ""
            yield f"{verdict.called(entry)}{part}: {reason}"


def _pictures(comparison: Comparison) -> Html:
    try:
        drawing.check()
    except UsageError as error:
        return _fill("sentence", title="Pictures", text=_capital(str(error)))
    figures = _join(map(_figure, pictures.pictures(comparison)))
    return _fill("pictures", figures=figures) if figures else figures


def _figure(picture: Picture) -> Html:
    try:
        drawn = Html(drawing.svg(picture))
    except Exception as error:  # the page is worth having without it
        drawn = _fill("undrawn", why=_capital(drawing.why_not(picture, error)))
    items = _join(_fill("item", text=f"{sentence}.") for sentence in picture.says)
    return _fill(
        "figure",
        name=picture.name,
        kind="leads" if picture.leads else "",
        title=_capital(picture.title),
        drawn=drawn,
        caption=picture.caption,
        says=_fill("says", items=items) if items else items,
    )


def _gradients(comparison: Comparison) -> Iterable[str]:
    """What each strategy's gradients say, of one seed; the picture has the spread."""
    for entry in comparison.entries:
        says = [result.gradients["says"] for result in entry.good if result.gradients.get("says")]
        if says:
            yield f"{verdict.called(entry)}: {says[0]}"


def _numbers(comparison: Comparison) -> Html:
    """The curves for those who read numbers."""
    rows = _join(row for entry in comparison.entries for row in _points(entry, comparison.metrics))
    return _fill("numbers", most=_ROWS, rows=rows) if rows else rows


def _points(entry: Contender, metrics: Iterable[str]) -> Iterable[Html]:
    for result in entry.good:
        for metric in metrics:
            points = result.curves.get(metric, [])
            step = max(1, math.ceil(len(points) / _ROWS))
            for point in points[::-step][::-1]:  # with the last
                yield _fill(
                    "point",
                    strategy=entry.name,
                    repeat=result.repeat + 1,
                    metric=metric,
                    seconds=amounts.plain(point.seconds, 4),
                    samples=f"{point.samples:,}",
                    value=amounts.plain(point.value, 5),
                )


def _capital(sentence: str) -> str:
    """As a sentence begins, but for names with brackets, which are typed as they are."""
    first = sentence.split(" ", 1)[0]
    return sentence if "(" in first or "_" in first else sentence[:1].upper() + sentence[1:]
