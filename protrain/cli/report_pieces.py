"""What pages of reports are put together from: the document, its head and facts, sections, legends, tables.

A page is one HTML file that fetches nothing and runs nothing. Text is escaped here, and only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from protrain.cli.report_charts import Drawing


def document(title: str, body: Iterable[str]) -> str:
    """The whole page."""
    style = Path(__file__).with_name("report.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def header(title: str, subtitle: str, notes: Iterable[str]) -> str:
    """What the page is about, and what a reader must know before reading on."""
    said = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p>{said}</header>"


def tiles(found: Iterable[tuple[str, str, str]]) -> str:
    """Key figures: what each is, the figure, and what it is measured against."""
    cells = "".join(f"<div><dt>{escape(n)}</dt><dd><b>{escape(v)}</b><span>{escape(m)}</span></dd></div>" for n, v, m in found)
    return f'<dl class="tiles">{cells}</dl>'


def facts(found: Iterable[tuple[str, str]]) -> str:
    """How it was measured, and on what."""
    return section("facts", "Facts", "", listed("facts", found))


def listed(kind: str, found: Iterable[tuple[str, str]]) -> str:
    """Names, each with what is said of it."""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in found)
    return f'<dl class="{kind}">{rows}</dl>'


def section(name: str, title: str, told: str, content: str) -> str:
    """A card of the page. Args: told, a sentence under its title; content, of tags."""
    said = f"<p>{escape(told)}</p>" if told else ""
    return f'<section class="{name}"><h2>{escape(title)}</h2>{said}{content}</section>'


def chart(drawing: Drawing) -> str:
    """Both of its drawings, of which the page shows the one that fits."""
    return f'<div class="chart wide">{drawing.wide}</div><div class="chart narrow">{drawing.narrow}</div>'


def legend(keys: Iterable[str], kind: str = "legend") -> str:
    """What `key` made."""
    return f'<ul class="{kind}">{"".join(keys)}</ul>'


def key(looks: str, letter: str, name: str, figure: str) -> str:
    """An entry of a legend. Args: looks, classes of its sign."""
    figures = f" <b>{escape(figure)}</b>" if figure else ""
    return f'<li><i class="{looks}" aria-hidden="true">{letter}</i><span>{escape(name)}{figures}</span></li>'


def table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    opened: bool = False,
    *,
    kind: str = "",
    strong: Sequence[str] = (),
) -> str:
    """Figures to the right of their names; one that is not opened waits for a click. Args: strong, names of rows."""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        f"<tr{_class('strong' if row[0] in strong else '')}>"
        f'<th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    shown = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
        f"<table{_class(kind)}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return shown if opened else f"<details><summary>{escape(title)}</summary>{shown}</details>"


def css(name: str) -> str:
    """A field's name as a class."""
    return name.replace("_", "-")


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
