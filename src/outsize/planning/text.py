"""Tables that a person reads: as text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MOST_WIDE = 110
"""Characters of the line under the head of a table."""

Rows = Sequence[Sequence[str]]
"""The first is the head."""


def text_table(rows: Rows, align: str) -> list[str]:
    """Lines of equal columns; `align` has "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{to}{width}}" for cell, to, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * min(sum(widths) + 2 * len(widths) - 2, MOST_WIDE))
    return lines


def html_table(rows: Rows, align: str) -> str:
    """The same for a notebook."""

    def line(row: Sequence[str], tag: str) -> str:
        cells = (
            f'<{tag} style="text-align: {"left" if to == "<" else "right"}">{escape(cell)}</{tag}>'
            for cell, to in zip(row, align, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    head, *body = rows
    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in body), "</table>"])


def html_lines(lines: Sequence[str]) -> str:
    """A paragraph, line by line."""
    return f"<p>{'<br/>'.join(map(escape, lines))}</p>"
