"""What a loader with ``depth="auto"`` is measured by: a device whose time tests turn, so that no machine's speed matters."""

import itertools

from protocol.scenarios import Source, kernel

from gpuaug import StreamedLoader
from gpuaug.loader.depth import AHEAD, COUNT, ROUNDS, SETTLE, WARM

TURNS = [AHEAD if number % 4 in (0, 3) else 0 for number in range(2 * ROUNDS)]
"""How the windows of a measurement are run."""
ALL = WARM + 2 * ROUNDS * (SETTLE + COUNT)
"""How many batches are asked for until everything has been measured, within one epoch."""

MEASURING = "'auto' (still measuring)"


def auto(cuda, batches, *stages):
    return StreamedLoader(Source(cuda, batches), stages, device="cuda", depth="auto")


def augment(cuda):
    return lambda images: kernel(cuda, images)


def decided(loader):
    """What ``repr`` says of the depth."""
    return repr(loader).partition("depth=")[2].partition(", feed=")[0]


class Training:
    """A training loop on a device whose steps take as long as the depth in use says, once the loop has settled.

    Before that, and in the first steps of all, they take a hundred times as long: whoever counts one of these finds out.
    """

    def __init__(self, cuda, loader, streamed_ms, in_line_ms):
        self.loader, self.depths = loader, []
        self._cuda, self._ms = cuda, {AHEAD: streamed_ms, 0: in_line_ms}
        self._warming = WARM + SETTLE - 1

    def epoch(self, most=None):
        """Take an epoch's batches, and return their numbers, in the order in which they were launched."""
        numbers, settling = [], SETTLE - 1
        for images, labels in itertools.islice(self.loader, most):
            self._cuda.history.receive(self._cuda.default, images.batch)
            self._cuda.read(images, labels)
            numbers.append(images.batch)
            now = self.loader.stats().depth
            if len(numbers) > 1 and now != self.depths[-1]:
                settling = SETTLE
            self.depths.append(now)
            self._cuda.now_ms += self._ms[now] * (100 if settling > 0 or self._warming > 0 else 1)
            settling, self._warming = settling - 1, self._warming - 1
        return numbers


def measured(cuda, streamed_ms, in_line_ms):
    training = Training(cuda, auto(cuda, ALL + 10), streamed_ms, in_line_ms)
    training.epoch()
    return training
