"""Ways to leave a loop: by an error of the loader's, or of one's own accord."""

from contextlib import suppress

import pytest

from gpuaug import IteratorEndedError


def failure(loader):
    """What arrived, and of the error that came then all but the lines of its traceback."""
    arrived = []
    try:
        arrived.extend(loader)
    except Exception as error:
        lines = str(error).splitlines()
        caught = type(error), lines[:1], lines[-1:], error.__notes__, error.__cause__
    else:
        caught = None
    return arrived, caught


def leave_by_break(loader):
    for index, _ in enumerate(loader):
        if index == 8:
            break


def leave_by_error(loader):
    with suppress(LookupError):
        for index, _ in enumerate(loader):
            if index == 8:
                raise LookupError


def leave_by_del(loader):
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    del batches


def leave_by_close(loader):
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    loader.close()
    with pytest.raises(IteratorEndedError):
        next(batches)


def leave_unread(loader):
    next(iter(loader))
