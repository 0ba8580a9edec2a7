import sys

import pytest

from bench.data import videos
from bench.peers import video_loaders
from bench.suites.transport import clips_files as suite


@pytest.fixture
def small(monkeypatch):
    """Few, short, small videos, where no peer is installed."""
    for name in ("nvidia", "nvidia.dali", "torchcodec", "torchcodec.decoders"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(videos, "SIZES", {"64x48": (48, 64)})
    for module in (videos, video_loaders):
        monkeypatch.setattr(module, "FRAMES", 30)
    monkeypatch.setattr(videos, "FILES", 5)
    monkeypatch.setattr(videos, "DISTINCT", 2)


def test_clips_of_files_are_measured_and_missing_peers_are_named(small, tmp_path):
    arguments = ["--device", "cpu", "--batch", "2", "--size", "16", "--frames", "3", "--workers", "0", "--sizes", "64x48"]
    result = suite.main([*arguments, "--seconds", "0.05", "--repeats", "1", "--videos", str(tmp_path)])
    assert [(row["case"], row["name"]) for row in result["rows"]] == [("64x48", "gpuaug, CPU")]
    assert {row["name"]: row["reason"] for row in result["settings"]["skipped"]}["gpuaug"] == "needs a GPU"
    assert len(list(tmp_path.glob("64x48/*.mp4"))) == 5
