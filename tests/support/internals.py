"""Private parts of the package that tests look at. A test reads them by these functions, and reads public names otherwise."""

from gpuaug.decode import nvjpeg
from gpuaug.fusion.backends import dispatch


def shared(loader):
    """The feed, lanes and stages that the iterators of a loader share."""
    return loader._shared


def ring(loader):
    """The ring of slots of a loader's feed."""
    return loader._shared.feed._ring


def branches(loader, index=0):
    """The encoders of a bound stage, by name."""
    return loader._shared.device_setup.bound_stages[index][0]._branches


def runner(loader, index=0, name=None):
    """The object that runs an encoder of a bound stage, eagerly or from its CUDA graphs."""
    return branches(loader, index)[name].runner


def program(augment, *settings):
    """The lowered program of a fused pipeline."""
    return augment._program(*settings)


def drawn(draws):
    """The parameters of a view by op, as they are drawn."""
    return draws._drawn


def sizes(draws):
    """The sizes of the images of a view after each op, as they are drawn."""
    return draws._sizes


def graphs(runner):
    """The CUDA graphs of an encoder, by signature."""
    return runner._graphs


def page_locked_slots(ring):
    """(address, bytes) of the slots that are page-locked, by number."""
    return ring._page_locked_slots


def copies(ring):
    """(event, objects) of the batches that are copied from the slots of a ring, in order."""
    return ring._copies


def tensors(writer):
    """(tensor, its place in the slot) by id, of what a worker has allocated in a slot."""
    return writer._tensors


def iterators(loader):
    """Iterators of a loader that have not ended."""
    return loader._iterators


def feed_iterators(loader):
    """Iterators over the wrapped loader that have not ended."""
    return loader._feed_iterators


def thread(feed_iterator):
    """The thread that pulls batches."""
    return feed_iterator.thread


def bound_stages(iterator):
    """The stages that an iterator runs, in order."""
    return iterator._bound_stages


def submitted(iterator):
    """Batches whose work has been submitted, in order."""
    return iterator._submitted


def rings(feed):
    """References to the rings of a feed."""
    return feed._rings


def triton_backend(device):
    """Triton's backend, or ``None`` with a warning where it does not run."""
    return dispatch._triton_backend(device)


def nvjpeg_calls(decoder):
    """The calls of nvJPEG of the engines, or of the hybrid decoder."""
    return decoder._decoder if hasattr(decoder, "_decoder") else decoder._decoders[nvjpeg.HYBRID]
