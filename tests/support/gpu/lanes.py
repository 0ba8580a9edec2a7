"""Lanes of a CPU for a loader that works ahead."""


class OnLanes:
    """Lanes of a CPU that say that they are a GPU's, so that the loader works ahead on them."""

    in_line = False

    def __init__(self, lanes):
        self._lanes = lanes

    def __getattr__(self, name):
        return getattr(self._lanes, name)
