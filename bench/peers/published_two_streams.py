"""Training loops with a side stream: as in published snippets, and without their bugs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.harness.loops import Serial


class PublishedTwoStreams(Serial):
    """Loop with two streams as in published snippets, measured because users have it. Do not copy it.

    Its bugs: ``record_stream`` is called with the producing stream, which has no effect, so the memory of a batch is reused
    while training still reads it; the side stream never waits for training; the last batch is never yielded.
    Unlike in the snippets, labels are copied on the training stream, because a label overwritten by pixels would stop the run
    with a device assert.
    """

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        side_stream = torch.cuda.Stream(self.device)
        previous = None
        for images, labels in self.loader:
            with torch.cuda.stream(side_stream), torch.no_grad():
                prepared_images = self.prepare(images.to(self.device, non_blocking=True))
                prepared_images.record_stream(side_stream)
            labels = labels.to(self.device, non_blocking=True)
            if previous is not None:
                yield previous
            torch.cuda.current_stream(self.device).wait_stream(side_stream)
            previous = prepared_images, labels


class TwoStreams(Serial):
    """Loop with two streams that wait for each other, written by hand: the next batch is prepared during the training step."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        side_stream = torch.cuda.Stream(self.device)
        host_batches = iter(self.loader)

        def launch() -> tuple[tuple[Tensor, Tensor], torch.cuda.Event] | None:
            batch = next(host_batches, None)
            if batch is None:
                return None
            # The side stream reuses the memory of an earlier batch, which the training step may still read.
            side_stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side_stream), torch.no_grad():
                images, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
                return (self.prepare(images), labels), side_stream.record_event()

        ready = launch()
        while ready is not None:
            prepared, event = ready
            ready = launch()
            torch.cuda.current_stream(self.device).wait_event(event)
            yield prepared
