"""Helpers for figures and tables: matplotlib's default style, text width, colours, and HTML for notebooks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from html import escape
from typing import Any

from gpuaug.core.errors import ArgumentError

INK, FAINT, BAND = "#24292f", "#dfe3e8", "#f5f7f9"
"""Colours of text, of lines and of background bands."""


@contextmanager
def drawing(name: str, alternative: str = "", style: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Context manager in which matplotlib draws in its default style instead of the user's.

    Args:
        name: Name of the drawing, for the error message.
        alternative: Text to append to the advice "Run pip install matplotlib", such as ``", or pass …"``.
        style: Settings of matplotlib that differ from its defaults.

    Raises:
        ArgumentError: If matplotlib is missing.
    """
    try:
        import matplotlib.style
    except ImportError as error:
        advice = f"Run pip install matplotlib{alternative}."
        raise ArgumentError(f"Drawing {name} failed, because matplotlib cannot be imported: {error}. {advice}") from error
    with matplotlib.style.context(["default", dict(style or {})]):
        yield


def shortened(text: str, max_length: int) -> str:
    """Return ``text``, with "…" in place of its middle if it has more than ``max_length`` characters.

    The end is kept, because similar names often differ at the end.
    """
    if len(text) <= max_length:
        return text
    return f"{text[: max_length // 2]}…{text[len(text) - (max_length - max_length // 2 - 1) :]}"


@lru_cache(4096)
def text_width_in(text: str, size: float) -> float:
    """Return the width of a text in inches, at a font size of ``size`` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width_pt, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)
    return float(width_pt) / 72  # 72 points per inch


def html_table(rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table of rows of text. The first row is the heading."""
    heading, *lines = rows
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(lines: Iterable[str]) -> str:
    """Return HTML with one paragraph per line of text."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)
