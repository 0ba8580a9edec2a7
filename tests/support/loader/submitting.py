"""A stage whose work on host batches other threads would do. A test says when it is done, in the thread of the test itself."""

from contextlib import nullcontext

import torch
from support.gpu.lanes import OnLanes

from gpuaug import StreamedLoader
from gpuaug.stages.base import BoundStage, DecodedSamples, Stage


class Work:
    """The work on one batch. It is done when ``finish`` is called, or when somebody waits for it."""

    replaced_samples = frozenset()
    undecoded = 0
    decoded = DecodedSamples(0, 0, {}, 1.0)

    def __init__(self, stage, number):
        self.stage, self.number, self.finished = stage, number, False

    def done(self):
        return self.finished

    def collect(self, batch, waiting=nullcontext):
        self.stage.log.append(f"{'collect' if self.finished else 'wait for'} {self.number}")
        if not self.finished:
            with waiting():
                self.stage.when_waited_for(self.number)
        self.finished = True
        self.stage.when_collected(self.number)
        return batch

    def abandon(self):
        self.finished = True
        self.stage.log.append(f"abandon {self.number}")


class Submitting(Stage):
    """Writes down what is submitted, collected (or waited for), launched and abandoned, by the number of the batch.

    Args:
        finished: Whether the work on a batch is done as soon as it is submitted.
    """

    kind = "submitting"

    def __init__(self, finished=lambda number: False, name=None):
        super().__init__(on=..., into=..., name=name)
        self.finished, self._works, self._log = finished, [], []  # what is public are arguments, which states compare
        self.when_submitted = self.when_waited_for = self.when_collected = lambda number: None

    works = property(lambda self: self._works)
    log = property(lambda self: self._log)

    def bind(self, name, lanes):
        return BoundSubmitting(name, self, lanes)


class BoundSubmitting(BoundStage):
    max_submitted = 2

    def __init__(self, name, stage, lanes):
        super().__init__(name, stage.selection, lanes)
        self._stage = stage

    def submit(self, batch, iterator_state, position, stages):
        stage, number = self._stage, int(batch)
        stage.log.append(f"submit {number}")
        stage.when_submitted(number)
        work = Work(stage, number)
        work.finished = stage.finished(number)
        stage.works.append(work)
        return batch, work

    def close(self, iterator_state):
        self._stage.log.append("close")

    def run(self, values, ready, position, iterator_state):
        self._stage.log.append(f"launch {int(values[0])}")
        return values[0]


def numbers(count=12):
    """A list of batches, which are all there at once."""
    return [torch.tensor(number) for number in range(count)]


def working_ahead(source, *stages, **options):
    """A loader on a CPU that launches batches ahead as it does on a GPU."""
    loader = StreamedLoader(source, stages, device="cpu", **options)
    loader._shared.device_setup.lanes = OnLanes(loader._shared.lanes)
    return loader
