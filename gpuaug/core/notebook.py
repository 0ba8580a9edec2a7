"""Tables and text as HTML, for notebooks. Pictures are in ``core/figure.py``."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text as a table, the heading first."""
    heading, *lines = rows
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(lines: Iterable[str]) -> str:
    """Lines of text as a paragraph each."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)
