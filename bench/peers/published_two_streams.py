"""A training loop with a side stream, as in published snippets."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.harness.loops import Serial


class PublishedTwoStreams(Serial):
    """Two streams as in published snippets, kept because users have this loop. Do not copy it.

    Its bugs: ``record_stream`` is called with the producing stream, which has no effect, so a batch's memory is reused
    while training still reads it; the side stream never waits for training; the last batch is never yielded.
    Labels stay on the training stream here, because a label overwritten by pixels would stop the run with a device assert.
    """

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        side = torch.cuda.Stream(self.device)
        previous = None
        for images, labels in self.loader:
            with torch.cuda.stream(side), torch.no_grad():
                prepared = self.prepare(images.to(self.device, non_blocking=True))
                prepared.record_stream(side)
            labels = labels.to(self.device, non_blocking=True)
            if previous is not None:
                yield previous
            torch.cuda.current_stream(self.device).wait_stream(side)
            previous = prepared, labels
