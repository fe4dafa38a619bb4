"""The report of `memlab run`: one HTML page with the table and every lesson's figures inside."""

import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memlab.experiments import Recipe
from memlab.series import Lesson

CAPTION = (
    f"Sizes in GB (1e9 bytes), metered, of a step of {Recipe.model}; below a technique, the data "
    "set and the batch x max_length without it. Where a row has two lines, the first is over "
    "everything off, the second over TRL's defaults; a price belongs to the line it stands on."
)
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>memlab report</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto }}
body {{ padding: 0 1rem }}
table {{ border-collapse: collapse }}
th, td {{ border-bottom: 1px solid #999; padding: .3rem .8rem; text-align: right;
  vertical-align: top; white-space: pre }}
th:first-child, td:first-child, td[colspan] {{ text-align: left; white-space: pre-line }}
img {{ max-width: 100%; background: #fff }}
pre {{ overflow-x: auto }}
</style>
<h1>memlab report</h1>
<p>{caption}</p>
{table}
{note}
{lessons}
</html>
"""


def write_report(
    folder: Path,
    lessons: Sequence[Lesson],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str | None = None,
) -> Path:
    """Write report.html into `folder`, which holds the executed lessons; returns its path.

    `note` is a remark below the table.
    The page holds its pictures itself, each with a text in its place for those who can't see it.
    """
    sections = []
    for lesson in lessons:
        figures = "\n".join(_figures(folder / lesson.path.name))
        name = html.escape(lesson.path.name)
        heading = html.escape(f"{lesson.number} {lesson.title}")
        sections.append(f'<h2>{heading}</h2>\n{figures}\n<p><a href="{name}">{name}</a></p>')
    report = folder / "report.html"
    table = _table(columns, rows)
    page = PAGE.format(
        caption=html.escape(CAPTION),
        table=table,
        note=f"<p>{html.escape(note)}</p>" if note else "",
        lessons="\n".join(sections),
    )
    report.write_text(page, encoding="utf-8")
    return report


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    body = "\n".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _cells(row: Sequence[str]) -> str:
    """The row's cells; the last one that says something takes the room of the empty ones after."""
    texts = list(row)
    while not texts[-1]:
        texts.pop()
    span = 1 + len(row) - len(texts)
    cells = [f"<td>{html.escape(text)}</td>" for text in texts]
    if span > 1:
        cells[-1] = cells[-1].replace("<td>", f'<td colspan="{span}">', 1)
    return "".join(cells)


def _figures(notebook: Path) -> Iterator[str]:
    """An HTML figure for each PNG among the outputs, its text version folded below it."""
    for cell in json.loads(notebook.read_bytes())["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                text = _joined(data.get("text/plain", ""))
                alt = output.get("metadata", {}).get("image/png", {}).get("alt")
                yield _figure(_joined(data["image/png"]), text, alt or text.partition("\n")[0])


def _figure(png: str, text: str, alt: str) -> str:
    source = "data:image/png;base64," + "".join(png.split())
    image = f'<img src="{source}" alt="{html.escape(alt or "figure")}">'
    details = f"<details><summary>as text</summary><pre>{html.escape(text)}</pre></details>"
    return f"<figure>\n{image}\n{details if text else ''}\n</figure>"


def _joined(text: Any) -> str:
    """Notebooks hold a text whole, or as a list of lines."""
    return text if isinstance(text, str) else "".join(text)
