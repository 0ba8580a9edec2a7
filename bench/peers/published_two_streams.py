"""A training loop with a side stream, as published snippets have it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.harness.loops import Serial


class PublishedTwoStreams(Serial):
    """Two streams as published snippets write them, kept because users have this loop. Do not copy it.

    Its faults: ``record_stream`` names the producer, which does nothing, so the memory of a batch is handed out again
    while training still reads it; nothing makes the side stream wait for training; the last batch is never yielded.
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
