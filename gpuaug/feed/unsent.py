"""Errors about batches that a worker cannot send, because shared memory is full or the batch cannot be pickled."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import queues
from typing import Any

from torch._utils import ExceptionWrapper

from gpuaug.feed.ring_memory import BatchInSlot, Memory
from gpuaug.feed.shared_storage import sending_memfd, use_memfd


class SendsErrors:
    """``worker_init_fn`` that makes a worker send an error in place of a batch that cannot be sent.

    Otherwise the thread of the worker's queue would print the error, and the loader would wait for the batch forever.

    Args:
        init: The user's ``worker_init_fn``, or ``None``.
        keeps_state: Whether workers send (batch, worker, state), like torchdata's workers, or the batch only.
        memory: Memory of the ring, whose slots hold batches of workers; ``None`` without a ring.
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
                print_error(error, item)  # a queue of the user, not of the DataLoader
                return
            number, content = item
            batch = content[0] if self._keeps_state else content
            if isinstance(batch, ExceptionWrapper):
                os._exit(1)  # the item is an error that cannot be sent. The DataLoader detects that the worker has ended
            if type(batch) is BatchInSlot and self._memory is not None:
                self._memory.map[self._memory.flag_at(*batch.number)] = 0  # frees the slot of the batch
            wrapped = ExceptionWrapper((type(error), error, error.__traceback__), f"in DataLoader worker process {worker}")
            # Like put(), which this thread cannot call, but at the front: the end of the epoch may be in the queue already.
            queue._sem.acquire()
            queue._buffer.appendleft((number, (wrapped, worker, None) if self._keeps_state else wrapped))

        queues.Queue._on_queue_feeder_error = send  # type: ignore[attr-defined]
        use_memfd()
        if self._init is not None:
            self._init(worker)


@contextmanager
def sending_errors(loader: Any, keeps_state: bool, memory: Memory | None = None) -> Iterator[None]:
    """Context manager in which ``loader`` starts workers that send errors. Restores the loader at its end."""
    user_init = loader.worker_init_fn
    if isinstance(user_init, SendsErrors):  # another thread is starting workers
        yield
        return
    try:
        loader.worker_init_fn = SendsErrors(user_init, keeps_state, memory)
        with sending_memfd():
            yield
    finally:
        loader.worker_init_fn = user_init
