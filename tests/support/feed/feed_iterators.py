"""Feed iterators over a loader, read without a ``StreamedLoader``."""

from gpuaug.feed.prefetch import open_feed_iterator


def feeding(loader):
    return open_feed_iterator(loader, lambda: None)


def take(source):
    """The next item, as the loader takes it."""
    item = source.get(block=True)
    source.refill()
    return item


def drained(source):
    """Everything that a feed gives, up to and with the end."""
    found = []
    while not found or not found[-1].ended:
        found.append(take(source))
    source.close()
    return found
