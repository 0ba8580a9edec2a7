"""What would be launched on a GPU, counted on a CPU."""

from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts the operations that would be kernels on a GPU, and refuses those for which the host would wait."""

    VIEWS = ("slice", "select", "view", "unsqueeze", "expand", "permute", "alias", "reshape", "detach", "split")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "index", "is_nonzero", "equal"), f"{name} waits"
        if not name.strip("_").startswith(self.VIEWS):
            self.names.append(name)
        return function(*args, **(kwargs or {}))
