from importlib.util import find_spec

from support.bench.fixtures import class_folder, one_thread

__all__ = ["class_folder", "one_thread"]

# The suites import what only the extra "bench" installs.
if any(find_spec(package) is None for package in ("kornia", "matplotlib", "rich", "skimage", "torchvision")):
    collect_ignore_glob = ["*"]
