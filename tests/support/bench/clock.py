"""A clock for windows, and rows that move it."""

from gpuaug.benchkit.windows import Variant


class Clock:
    """A clock that only steps move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("gpuaug.benchkit.windows.perf_counter", lambda: self.now)

    def row(self, name, step_s=0.01):
        def steps():
            while True:
                self.now += step_s
                yield 4

        return Variant(name, steps)
