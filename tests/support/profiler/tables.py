"""What a notebook shows."""

from html.parser import HTMLParser


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.paragraphs, self.into = [], [], None

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.into = self.rows[-1]
            self.into.append("")
        elif tag == "p":
            self.into = self.paragraphs
            self.into.append("")

    def handle_data(self, text):
        self.into[-1] += text


def read(html):
    """The rows of the table in it, and its paragraphs."""
    reader = _Reader()
    reader.feed(html)
    return reader.rows, reader.paragraphs
