from support.bench.fixtures import class_folder, made_photographs, one_thread, photograph_cache

__all__ = ["class_folder", "made_photographs", "one_thread", "photograph_cache"]
