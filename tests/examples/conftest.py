import pytest
from support.bench.fixtures import class_folder, one_thread

from gpuaug.benchkit import videos

__all__ = ["class_folder", "one_thread"]


@pytest.fixture(scope="session")
def video_folder(tmp_path_factory):
    """Four classes of three small videos."""
    root = tmp_path_factory.mktemp("videos")
    videos.write(root, per_class=3, frames=16, height=48, width=64)
    return root
