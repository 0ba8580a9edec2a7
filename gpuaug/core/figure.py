"""Figure class of ``show`` and of timelines. This module imports matplotlib: import it within ``plotting.drawing``."""

from io import BytesIO

from matplotlib import figure, style


class Figure(figure.Figure):
    """Figure that a notebook displays without ``%matplotlib``, which works only for figures of pyplot."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        with style.context("default"):
            self.savefig(file, format="png")
        return file.getvalue()
