"""The figure that ``show`` and timelines draw on. It imports matplotlib: import it within ``plotting.drawing``."""

from io import BytesIO

from matplotlib import figure, style


class Figure(figure.Figure):
    """A figure that a notebook shows without ``%matplotlib``, which is for figures that pyplot knows."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        with style.context("default"):
            self.savefig(file, format="png")
        return file.getvalue()
