"""Errors of batches that a worker cannot send, because shared memory is full or they cannot be pickled."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import queues
from typing import Any

from torch._utils import ExceptionWrapper

from gpuaug.feed.ring_memory import Described, Memory
from gpuaug.feed.shared_storage import sending_memfd, use_memfd


class SendsErrors:
    """A ``worker_init_fn`` after which the error of a batch that cannot be sent is sent in its place.

    The queue's thread would print it and go on, and the loader would wait for that batch for ever. Costs a batch nothing.

    Args:
        init: The user's ``worker_init_fn``, or ``None``.
        keeps_state: Whether workers send a batch, their number and their state, as those of torchdata do.
        memory: The ring's, where there is one.
    """

    def __init__(self, init: Callable[[int], None] | None, keeps_state: bool, memory: Memory | None) -> None:
        self._init = init
        self._keeps_state = keeps_state
        self._memory = memory

    def __call__(self, worker: int) -> None:
        """Prepare a worker process."""
        print_error = queues.Queue._on_queue_feeder_error  # type: ignore[attr-defined]

        def send(queue: Any, error: Exception, item: Any) -> None:
            if not (type(item) is tuple and len(item) == 2 and type(item[0]) is int):
                print_error(error, item)  # of a queue of the user's
                return
            number, sent = item
            batch = sent[0] if self._keeps_state else sent
            if isinstance(batch, ExceptionWrapper):
                os._exit(1)  # nothing can be sent, which DataLoader sees
            if type(batch) is Described and self._memory is not None:
                self._memory.map[self._memory.flag_at(*batch.number)] = 0
            wrapped = ExceptionWrapper((type(error), error, error.__traceback__), f"in DataLoader worker process {worker}")
            # As put() does, but first in the queue, on whose own thread this is: after it may be the end of an epoch.
            queue._sem.acquire()
            queue._buffer.appendleft((number, (wrapped, worker, None) if self._keeps_state else wrapped))

        queues.Queue._on_queue_feeder_error = send  # type: ignore[attr-defined]
        use_memfd()
        if self._init is not None:
            self._init(worker)


@contextmanager
def sending_errors(loader: Any, keeps_state: bool, memory: Memory | None = None) -> Iterator[None]:
    """A block in which ``loader`` starts workers that send their errors. Restores the loader afterwards."""
    own = loader.worker_init_fn
    if isinstance(own, SendsErrors):  # another thread is starting workers
        yield
        return
    try:
        loader.worker_init_fn = SendsErrors(own, keeps_state, memory)
        with sending_memfd():
            yield
    finally:
        loader.worker_init_fn = own
