"""The report: one HTML file with everything in it, which needs no network and no scripts to be read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from hocket.compare import amounts, canvas, figures, store, summary, verdict, whole
from hocket.compare.results import Comparison, Entry
from hocket.compare.style import TONES, Looks
from hocket.errors import UsageError

NAME = "report.html"
_ROWS = 12  # of one run's curve in the table of numbers; the JSON has all
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write(comparison: Comparison, folder: Path) -> Path:
    """Writes ``report.html`` into ``folder``, which is made if it is not there; without matplotlib it has no pictures.

    Raises:
        UsageError: The folder cannot be written to.
    """
    path, text = folder / NAME, html(comparison)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole.write(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; name another folder") from error
    return path


def html(comparison: Comparison) -> str:
    """The page's text."""
    title = f"Comparison of {Path(comparison.script).name}: which strategy is fastest?"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="answer">{_together(escape(verdict.of(comparison)))}</p>',
        *_summary(comparison),
        *_failures(comparison),
        *_list("Notes", comparison.notes),
        *_pictures(comparison),
        *_gradients(comparison),
        *_about(comparison),
        *_numbers(comparison),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>\n{_css()}</style>\n</head>\n'
    )
    return "\n".join([f"{head}<body>\n<main>", *body, "</main>\n</body>\n</html>\n"])


def _css() -> str:
    light = " ".join(f"--{name}: {tone.light};" for name, tone in TONES.items())
    dark = " ".join(f"--{name}: {tone.dark};" for name, tone in TONES.items())
    text = resources.files("hocket.compare").joinpath("page.css").read_text(encoding="utf-8")
    return text.replace("PALETTE }", f"{light} }}").replace("DARK }", f"{dark} }}")


def _summary(comparison: Comparison) -> list[str]:
    table, looks = summary.of(comparison), Looks(comparison)
    if not table.rows:
        return []
    best = verdict.winner(comparison)
    cells = []
    for entry, row in zip(comparison.entries, table.rows, strict=True):
        look = looks.of(entry)
        ground = f"var(--{look.tone})"
        if look.hatch:
            ground = f"repeating-linear-gradient(45deg, {ground} 0 2px, var(--paper) 2px 3.5px)"
        mark = f'<span class="mark" style="background: {ground}"></span>'
        others = "".join(f"<td>{_lines(text)}</td>" for text in row[1:])
        kind = ' class="best"' if entry is best else ""
        cells.append(f'<tr{kind}><th scope="row">{mark}{_breakable(row[0])}</th>{others}</tr>')
    heads = "".join(
        f'<th scope="col"{"" if column.number else " class=text"} title="{escape(column.about)}">'
        f"{escape(column.title)}</th>"
        for column in table.columns
    )
    repeats = f"Medians of {comparison.repeats} repeats." if comparison.repeats > 1 else "One run of each."
    titles = {column.title for column in table.columns}
    said = [repeats]
    if "× passes" in titles:
        said.append("Time to target = one pass × passes over the data.")
    if "efficiency" in titles:
        said.append("Efficiency is the speed-up for each worker.")
    if any(summary.shares_memory(entry) for entry in comparison.entries):
        said.append("Where 0 B are sent in shared memory, workers read and write the same parameters.")
    return [
        "<h2>Summary</h2>",
        '<div class="scroll summary" tabindex="0" role="region" aria-label="Summary">',
        f"<table><thead><tr>{heads}</tr></thead><tbody>",
        *cells,
        "</tbody></table></div>",
        f'<p class="soft">{" ".join(said)}</p>',
    ]


def _lines(text: str) -> str:
    """The second one is small."""
    first, _, second = text.partition("\n")
    return escape(first) + (f"<br><small>{escape(second)}</small>" if second else "")


def _breakable(name: str) -> str:
    """A strategy may go on in the next line after its brackets and commas."""
    return escape(name).replace("(", "(<wbr>").replace(",", ",<wbr>")


def _failures(comparison: Comparison) -> list[str]:
    """One line for each reason, with the repeats that it ended."""
    found = []
    for entry in comparison.entries:
        reasons: dict[str, int] = {}
        for result in entry.results:
            if result.failure:
                reasons[result.failure] = reasons.get(result.failure, 0) + 1
        for reason, count in reasons.items():
            part = f", {count} of {len(entry.results)} repeats" if len(entry.results) > 1 else ""
            found.append(f"{verdict.called(entry)}{part}: {reason}")
    return _list("Failed", found, "failed")


def _list(title: str, sentences: Iterable[str], kind: str = "") -> list[str]:
    lines = [f"<li>{escape(sentence)}</li>" for sentence in sentences]
    opening = f'<ul class="{kind}">' if kind else "<ul>"
    return [f"<h2>{title}</h2>", opening, *lines, "</ul>"] if lines else []


def _pictures(comparison: Comparison) -> list[str]:
    try:
        canvas.check()
    except UsageError as error:
        return ["<h2>Pictures</h2>", f"<p>{escape(_capital(str(error)))}</p>"]
    found = []
    for picture in figures.pictures(comparison):
        says = "".join(f"<li>{escape(sentence)}.</li>" for sentence in picture.says)
        try:
            drawn = canvas.svg(picture)
        except Exception as error:  # the page is worth having without it
            drawn = f'<p class="failed">{escape(_capital(canvas.why_not(picture, error)))}.</p>'
        found.append(
            f'<figure id="{picture.name}"{" class=leads" if picture.leads else ""}>'
            f"<h3>{escape(_capital(picture.title))}</h3>\n{drawn}\n"
            f"<figcaption>{escape(picture.caption)}</figcaption>"
            + (f'<ul class="says">{says}</ul>' if says else "")
            + "</figure>"
        )
    return ["<h2>Pictures</h2>", '<div class="plots">', *found, "</div>"] if found else []


def _gradients(comparison: Comparison) -> list[str]:
    """What each strategy's gradients say, once where repeats say the same."""
    found: dict[str, None] = {}
    for entry in comparison.entries:
        for result in entry.good:
            if says := result.gradients.get("says"):
                found[f"{verdict.called(entry)}: {says}"] = None
                break  # of one seed; the picture has the spread
    return _list("Gradients", found)


def _about(comparison: Comparison) -> list[str]:
    facts = {"command": comparison.command, **comparison.about}
    lines = [
        f"<dt>{escape(name)}</dt><dd>{f'<code>{escape(text)}</code>' if name == 'command' else escape(text)}</dd>"
        for name, text in facts.items()
        if text
    ]
    return ["<h2>How this was made</h2>", '<dl class="about">', *lines, "</dl>"]


def _numbers(comparison: Comparison) -> list[str]:
    """The curves for those who read numbers, and for programs."""
    rows = [row for entry in comparison.entries for row in _curve_rows(entry, comparison.metrics)]
    found = []
    if rows:
        heads = "".join(
            f'<th scope="col"{kind}>{name}</th>'
            for name, kind in (
                ("strategy", ' class="text"'),
                ("repeat", ""),
                ("metric", ' class="text"'),
                ("time (s)", ""),
                ("samples", ""),
                ("value", ""),
            )
        )
        found = [
            f"<details><summary>The curves as numbers (at most {_ROWS} of each; all are in this file as JSON, in the"
            " element with the id <code>data</code>)</summary>",
            '<div class="scroll" tabindex="0" role="region" aria-label="Curves as numbers">',
            f"<table><thead><tr>{heads}</tr></thead><tbody>",
            *rows,
            "</tbody></table></div></details>",
        ]
    data = json.dumps(store.to_json(comparison), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")  # no tag can begin in it
    return [*found, f'<script type="application/json" id="data">{data}</script>']


def _curve_rows(entry: Entry, metrics: Sequence[str]) -> list[str]:
    found = []
    for result in entry.good:
        for metric in metrics:
            points = result.curves.get(metric, [])
            step = max(1, math.ceil(len(points) / _ROWS))
            for point in points[::-step][::-1]:  # with the last
                found.append(
                    f'<tr><td class="text">{escape(entry.name)}</td><td>{result.repeat + 1}</td>'
                    f'<td class="text">{escape(metric)}</td><td>{amounts.plain(point.seconds, 4)}</td>'
                    f"<td>{point.samples:,}</td><td>{amounts.plain(point.value, 5)}</td></tr>"
                )
    return found


def _together(text: str) -> str:
    """A number and its unit stay in one line."""
    return re.sub(r"(\d) (ms|s|min|h|samples/s)\b", "\\1&nbsp;\\2", text)


def _capital(sentence: str) -> str:
    """As a sentence begins, but for names with brackets, which are typed as they are."""
    first = sentence.split(" ", 1)[0]
    return sentence if "(" in first or "_" in first else sentence[:1].upper() + sentence[1:]
