"""Figure class of ``show`` and of timelines.

Import this module only within ``plotting.drawing``: the module imports matplotlib, which may not be installed, and ``drawing``
then raises an error with advice.
"""

from io import BytesIO

from matplotlib import figure, style


class Figure(figure.Figure):
    """Figure that a notebook displays. A notebook displays other figures only if they were created by pyplot."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        with style.context("default"):
            self.savefig(file, format="png")
        return file.getvalue()
