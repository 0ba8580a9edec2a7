from support.bench.fixtures import class_folder, one_thread

__all__ = ["class_folder", "one_thread"]
