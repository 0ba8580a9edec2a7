"""The host side: a thread that pulls batches from the loader, so that a slow one never holds up a batch that is ready.

``iter(loader)`` is called on the consumer's thread, because it starts workers and draws their seed from the global generator.
The thread then only calls ``next``; it makes no CUDA calls of its own, so graphs that the user captures survive it.
"""

import contextvars
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpuaug.errors import TakenOverError

QUEUED = 2
"""Host batches that wait for the training thread. The loader's workers keep their own; more here only holds memory."""

STOP_S = 5.0
"""How long leaving a loop waits for a loader that is inside ``next``, as long as ``DataLoader`` waits for its workers."""

_log = logging.getLogger("gpuaug")


@dataclass(slots=True)
class Pulled:
    """What one ``next`` of the loader gave: a batch, an error, or the end."""

    batch: Any = None
    error: BaseException | None = None
    ended: bool = False
    stream: Any = None
    """The CUDA stream that was current when the batch was pulled, where its resident tensors were written."""


class Feed:
    """One pass over a loader, pulled in the background.

    Args:
        loader: Any iterable of host batches.
        current_stream: Called in the thread after each pull.

    Raises:
        Exception: Whatever ``iter(loader)`` raises.
    """

    def __init__(self, loader: Iterable[Any], current_stream: Callable[[], Any]) -> None:
        self.iterator = iter(loader)
        self._box = _Mailbox()
        target = _pull_in(_ThreadState(), self.iterator, self._box, current_stream)
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), name="gpuaug-feed", daemon=True)
        self._thread.start()
        # Also runs when the interpreter ends, before it takes the modules away from under the thread.
        self._stop = weakref.finalize(self, _stop, self._box, self._thread)

    def get(self, *, block: bool) -> Pulled | None:
        """The next thing pulled, in order; ``None`` if there is none yet and ``block`` is false.

        Raises:
            TakenOverError: If a newer iterator has taken the loader's workers over.
        """
        return self._box.take(block=block)

    def take_over(self) -> None:
        """End this pass in favour of a newer one. The next :meth:`get` raises."""
        self._box.taken_over = True
        self._box.close()
        self._thread.join()  # a persistent loader must not be reset while it is being read

    def close(self) -> None:
        """End the thread and let go of the loader's iterator, whose workers end with it. Idempotent."""
        self._stop()
        self.iterator = iter(())


class _Mailbox:
    """A queue of a few items between the two threads, which either side can close."""

    def __init__(self) -> None:
        self._items: deque[Pulled] = deque()
        self._changed = threading.Condition()
        self.closed = False
        self.taken_over = False

    def put(self, item: Pulled) -> bool:
        """Wait for room and add ``item``. False when the mailbox was closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < QUEUED)
            if not self.closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self.closed

    def take(self, *, block: bool) -> Pulled | None:
        with self._changed:
            if block:
                self._changed.wait_for(lambda: self.closed or self._items)
            if self.taken_over:
                raise TakenOverError(
                    "An iterator must be the only one on workers that persist, got a newer one that took them over. "
                    "Finish the first loop before starting the next, or pass persistent_workers=False to the DataLoader."
                )
            if not self._items:
                return Pulled(ended=True) if self.closed else None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


class _ThreadState:
    """Settings that PyTorch keeps for each thread, as they are on the thread that makes this."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
        self._num_threads = torch.get_num_threads()
        self._default_device = torch.get_default_device()
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0

    def adopt(self) -> None:
        """Make the calling thread's settings the same, for good."""
        torch.set_grad_enabled(self._grad)
        for kind, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_num_threads(self._num_threads)
        if self._default_device != torch.get_default_device():
            torch.set_default_device(self._default_device)
        if self._cuda_device:
            torch.cuda.set_device(self._cuda_device)  # sources that use CUDA themselves expect the consumer's device

    def inference_mode(self) -> Any:
        return torch.inference_mode(self._inference)


def _pull_in(
    state: _ThreadState, iterator: Iterator[Any], box: _Mailbox, current_stream: Callable[[], Any]
) -> Callable[[], None]:
    # A closure over the parts, not a method: a thread that held the Feed would keep it from ever being collected.
    def pull() -> None:
        state.adopt()
        with state.inference_mode():
            while not box.closed:
                try:
                    item = Pulled(batch=next(iterator))
                except StopIteration:
                    item = Pulled(ended=True)
                except BaseException as error:
                    item = Pulled(error=error, ended=True)
                item.stream = current_stream()
                ended = item.ended
                if not box.put(item) or ended:
                    return
                del item  # or the thread would hold a batch while it waits for the next

    return pull


def _stop(box: _Mailbox, thread: threading.Thread) -> None:
    box.close()
    if thread is threading.current_thread():  # collected by the thread itself
        return
    thread.join(STOP_S)
    if thread.is_alive():
        _log.warning("The loader is still inside next() after %.0f s. Its thread ends when that returns.", STOP_S)
