from importlib.util import find_spec

from support.bench.fixtures import class_folder, made_photographs, one_thread, photograph_cache

__all__ = ["class_folder", "made_photographs", "one_thread", "photograph_cache"]

# The suites import what only the extra "bench" installs.
if any(find_spec(package) is None for package in ("kornia", "matplotlib", "rich", "skimage", "torchvision")):
    collect_ignore_glob = ["*"]
