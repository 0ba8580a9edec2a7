import mmap
import os

import pytest
from support.files.encoded import encoded

from bench.harness.result_check import check_result
from bench.suites.transport import soak

CPU = ["--device", "cpu"]


@pytest.fixture(autouse=True)
def _frozen(monkeypatch):
    """Keep frozen what tests have frozen after their collection: the suite thaws it, and to freeze it again takes a second."""
    monkeypatch.setattr(soak.gc, "unfreeze", lambda: None)


def assert_flat(*flags):
    result = soak.main([*CPU, *flags])
    check_result(result)
    kinds = result["settings"]["kinds"]
    assert all(kind["batches"] > 0 for kind in kinds.values())
    assert {"list", "ring", "features", "ragged", "decoded", "left early"} <= set(kinds)
    assert sum(kind["batches"] for kind in kinds.values()) >= int(flags[-1])
    assert {"resident memory", "shared memory", "threads", "descriptors"} <= {row["name"] for row in result["rows"]}


@pytest.mark.parametrize("batches", ["500", pytest.param("100000", marks=pytest.mark.slow)])
def test_a_process_holds_no_more_after_many_batches(batches):
    assert_flat("--batches", batches)


@pytest.mark.gpu
def test_a_process_holds_no_more_on_a_gpu():
    result = soak.main(["--device", "cuda", "--batches", "20000"])
    assert "reserved GPU memory" in {row["name"] for row in result["rows"]}


@pytest.mark.parametrize("seconds", ["1", pytest.param("60", marks=pytest.mark.slow)])
def test_a_process_holds_no_more_after_many_files_of_a_folder(seconds, tmp_path):
    for number in range(12):
        path = tmp_path / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(30 + number, 40))
    result = soak.main([*CPU, "--folder", str(tmp_path), "--batch", "4", "--workers", "0", "--seconds", seconds])
    check_result(result)
    assert set(result["settings"]["kinds"]) == {"files"}
    assert len(result["rows"][0]["readings"]) >= 4
    assert str(tmp_path) not in str(result["settings"]), "a result does not tell where images lie"


@pytest.mark.parametrize("resource", ["descriptors", "private memory"])
def test_growth_is_found(resource, monkeypatch):
    leaked = []

    def leak():
        if resource == "descriptors":
            leaked.append(os.open("/dev/null", os.O_RDONLY))
        else:  # pages of its own: bytes might lie where earlier tests have left the heap as large as this
            leaked.append(mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            leaked[-1].write(b"x" * (4 << 20))

    monkeypatch.setattr(soak, "epochs", lambda options: {"leaking": (100, leak)})
    with pytest.raises(SystemExit, match=f"because the process holds more and more of: .*{resource}"):
        soak.main([*CPU, "--batches", "2000"])
    for handle in leaked:
        os.close(handle) if resource == "descriptors" else handle.close()
