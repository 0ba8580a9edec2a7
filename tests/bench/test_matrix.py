import gc
import importlib
import itertools
import json
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import gpuaug
from gpuaug.benchkit import results
from gpuaug.benchkit.windows import Variant

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("torchvision")
pytest.importorskip("kornia")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = (8, 16, 32, 64)


def module(name):
    return importlib.import_module(f"bench.{name}")


class Ticking:
    """A clock that only steps move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("gpuaug.benchkit.windows.perf_counter", lambda: self.now)

    def row(self, name, step_s=0.01):
        def steps():
            while True:
                self.now += step_s
                yield 4

        return Variant(name, steps)


@pytest.fixture
def clock(monkeypatch):
    return Ticking(monkeypatch)


@pytest.fixture
def measure(tmp_path):
    """Measures cases whose rows a function of the batch size makes; the flags are as on a command line."""

    def measured(rows, *flags, sizes="8,16"):
        common = module("common")
        path = tmp_path / "made.json"
        usual = ["--device", "cpu", "--seconds", "0.1", "--repeats", "2", "--workers", "0", "--batch", sizes]
        options = common.read(common.parser("", batch="8", sweeps=True), [*usual, "--json", str(path), *flags])
        cases = [({"batch_size": size}, lambda stack, size=size: rows(size)) for size in options.batch]
        made = common.measure("matrix", options, cases, baseline="serial", ours=("ours",))
        results.check(json.loads(path.read_text()))
        assert json.loads(path.read_text())["settings"]["skipped"] == made["settings"]["skipped"]
        return made

    return measured


def names(made, size):
    return [row["name"] for row in made["rows"] if row["batch_size"] == size]


def test_a_missing_peer_is_named_with_its_reason_and_printed_once(measure, clock, capsys):
    rows = module("rows")

    def missing():
        raise rows.MissingError("not installed: No module named 'peer'")

    def broken():
        raise TypeError("unexpected keyword\nmore")

    made = measure(
        lambda size: [
            clock.row("serial"),
            rows.peer("away", CUDA, missing),
            rows.peer("broken", CUDA, broken),
            rows.peer("there", CUDA, lambda: clock.row("there")),
            rows.peer("two streams", CPU, missing),
            rows.peer("anywhere", CPU, lambda: clock.row("anywhere"), needs_gpu=False),
        ]
    )
    reasons = {
        "away": "not installed: No module named 'peer'",
        "broken": "TypeError: unexpected keyword",
        "two streams": "needs a GPU",
    }
    assert made["settings"]["skipped"] == [
        {"batch_size": size, "name": name, "reason": reason} for size in (8, 16) for name, reason in reasons.items()
    ]
    assert names(made, 8) == names(made, 16) == ["serial", "there", "anywhere"]
    shown = capsys.readouterr().out
    assert shown.count("away skipped: not installed") == 1
    assert "matrix: batch size 8: two streams skipped: needs a GPU\n" in shown


def test_a_peer_that_raises_while_it_is_measured_costs_its_row_only(measure, clock):
    rows = module("rows")

    def failing():
        yield 4
        raise RuntimeError("out of memory\nTry less")

    def made_rows(size):
        peer = Variant("peer", failing) if size == 16 else clock.row("peer")
        return [clock.row("serial"), rows.peer("peer", CUDA, lambda: peer), clock.row("ours")]

    made = measure(made_rows, sizes="8,16,32")
    assert names(made, 8) == names(made, 32) == ["serial", "peer", "ours"]
    assert names(made, 16) == ["serial", "ours"]
    assert made["settings"]["skipped"] == [{"batch_size": 16, "name": "peer", "reason": "RuntimeError: out of memory"}]


def test_an_error_of_ones_own_row_is_raised_and_what_was_measured_is_kept(measure, clock, tmp_path):
    def failing():
        yield 4
        raise RuntimeError("ours broke")

    def made_rows(size):
        return [clock.row("serial"), Variant("ours", failing) if size == 16 else clock.row("ours")]

    with pytest.raises(RuntimeError, match="ours broke"):
        measure(made_rows)
    kept = json.loads((tmp_path / "made.json").read_text())
    results.check(kept)
    assert {row["batch_size"] for row in kept["rows"]} == {8}


def test_rows_may_name_what_cannot_be_had_here(measure, clock):
    rows = module("rows")

    def made_rows(size):
        return [clock.row("serial"), rows.peer("away", CPU, None), rows.peer("unwanted", CPU, None), clock.row("ours")]

    made = measure(made_rows, "--rows", "away", sizes="8")
    assert names(made, 8) == ["serial"]
    assert [row["name"] for row in made["settings"]["skipped"]] == ["away"]


def test_slow_rows_are_left_out_at_the_sizes_after_that(measure, clock):
    def made_rows(size):
        return [clock.row("serial", 0.4), clock.row("slow", 0.005 * size), clock.row("ours")]

    made = measure(made_rows, "--slowest", "0.1", "--suite", "renamed", sizes="8,16,32,64")
    assert made["suite"] == "renamed"
    assert "suite" not in made["settings"]
    assert [names(made, size) for size in (8, 16, 32, 64)] == [["serial", "slow", "ours"]] * 3 + [["serial", "ours"]]
    (left,) = made["settings"]["skipped"]
    assert left["reason"] == "a step took 0.16 s with batch size 32, more than --slowest 0.1"


def test_experiments_say_which_rows_a_cpu_cannot_have(capsys):
    sizes = ["--size", "32", "--batch", "2", "--width", "1", "--workers", "0", "--seconds", "0.02", "--repeats", "1"]
    flags = ["--device", "cpu", "--rows", "two streams, as published;timm PrefetchLoader;DALI"]
    made = module("classifier").main([*sizes, *flags])
    assert [(row["name"], row["reason"]) for row in made["settings"]["skipped"]] == [
        (name, "needs a GPU") for name in ("two streams, as published", "timm PrefetchLoader", "DALI")
    ]
    assert "timm PrefetchLoader skipped: needs a GPU" in capsys.readouterr().out


def test_without_timm_or_dali_the_reason_says_so(monkeypatch):
    rows = module("rows")
    for package in ("timm", "timm.data", "timm.data.loader", "nvidia", "nvidia.dali"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(rows.MissingError, match=r"^not installed: .*timm"):
        module("loops").Prefetched([], CPU, None)
    with pytest.raises(rows.MissingError, match=r"^not installed: .*nvidia"):
        module("dali").Batches("seed", [], 2, 32, CPU)
    with pytest.raises(rows.MissingError, match=r"^not installed: .*nvidia"):
        module("dali").build_ragged([], 32, antialias=False, device=CPU)


def test_a_timm_that_overwrites_batches_is_not_measured(monkeypatch):
    old = ModuleType("timm.data.loader")
    old.PrefetchLoader = lambda loader, **settings: SimpleNamespace(**settings)
    monkeypatch.setitem(sys.modules, "timm.data.loader", old)
    monkeypatch.setitem(sys.modules, "timm.data", ModuleType("timm.data"))
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    with pytest.raises(module("rows").MissingError, match="timm must be newer"):
        module("loops").Prefetched([], CPU, None)


class Labelled(torch.utils.data.Dataset):
    """Images that are one colour, ten times their label."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((3, 32, 32), 10 * index, dtype=torch.uint8), index


def test_timm_scales_and_does_nothing_else():
    pytest.importorskip("timm")
    loader = DataLoader(Labelled(), batch_size=4)
    prefetched = list(module("loops").Prefetched(loader, CPU, lambda images: images * 2))
    assert len(prefetched) == 5
    for (images, labels), (expected, own) in zip(prefetched, loader, strict=True):
        torch.testing.assert_close(images, expected / 255 * 2)
        assert torch.equal(labels, own)


def test_dali_keeps_labels_with_their_images():
    pytest.importorskip("nvidia.dali")
    pipelines = module("pipelines")
    endless = itertools.cycle(DataLoader(Labelled(), batch_size=4))
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (pipelines.MEAN, pipelines.STD))
    for images, labels in itertools.islice(module("dali").Batches("seed", endless, 4, 32, CPU), 7):
        assert images.shape == (4, 3, 32, 32)
        # The middle, which no rotation leaves.
        colours = ((images * std + mean) * 255)[:, 0, 16, 16]
        torch.testing.assert_close(colours, 10.0 * labels, atol=1.0, rtol=0)


class Cyclic:
    """What matters here of a pipeline of DALI's: it holds what it pulls from, and itself."""

    def __init__(self, pull):
        self.pull, self.itself = pull, self

    def build(self):
        pass

    def run(self):
        images = torch.from_numpy(self.pull()).float()
        return [SimpleNamespace(as_tensor=lambda: images)]


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "DALI"])
def test_a_loader_behind_dali_ends_with_the_loop(real, monkeypatch):
    """As cyclic garbage it would wait for each of its workers, seconds long."""
    if real:
        pytest.importorskip("nvidia.dali")
    else:
        made = ModuleType("nvidia.dali")
        made.fn, made.types, made.pipeline_def = None, None, lambda **_: lambda _body: Cyclic
        monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
        monkeypatch.setitem(sys.modules, "nvidia.dali", made)
    pulled = iter(DataLoader(Labelled(), batch_size=4))
    held = weakref.ref(pulled)
    batches = iter(module("dali").Batches("seed", pulled, 4, 32, CPU))
    del pulled
    gc.disable()
    try:
        next(batches)
        assert held() is not None
        batches.close()
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("after", [1, 130])
def test_a_loader_that_decides_is_measured_from_then_on(after):
    trained = []

    class Batches(list):
        def __repr__(self):
            return "'auto' (still measuring)" if len(trained) < after else "'auto' (streamed: 1 ms a batch in line, 1 streamed)"

    steps = module("loops").decided(Batches([(None, [0, 0])] * 1000), lambda images, labels: trained.append(labels))()
    for count in range(after, after + 3):
        assert next(steps) == 2
        assert len(trained) == count, "those before it has decided are trained on, and not counted"


@pytest.mark.parametrize(("without", "first"), [({0, 3}, 8), (set(range(1000)), 16), (set(), 4)])
def test_a_loader_with_slots_is_measured_once_its_batches_come_in_them(without, first):
    came = SimpleNamespace(other_batches=0)

    class Batches:
        def stats(self):
            return came

        def __iter__(self):
            for number in range(1000):
                came.other_batches += number in without
                yield number, [0, 0]

    trained = []
    steps = module("loops").settled(Batches(), lambda number, labels: trained.append(number), 4)()
    assert next(steps) == 2
    assert trained == list(range(first + 1))
    next(steps)
    assert len(trained) == first + 2


def test_a_loader_on_a_cpu_has_nothing_to_decide():
    trained = []
    loader = gpuaug.StreamedLoader([(torch.ones(1), torch.ones(2))] * 5, device="cpu", depth="auto")
    assert next(module("loops").decided(loader, lambda images, labels: trained.append(labels))()) == 2
    assert len(trained) == 1


def test_commands_get_their_words_and_their_status_counts(monkeypatch, capsys):
    main = module("__main__")
    got = []
    for command in main.COMMANDS:
        monkeypatch.setattr(module(command), "main", lambda argv, command=command: got.append((command, argv)) or 3)
        assert main.main([command, "a", "--flag", "b c", "-h"]) == 3
    assert got == [(command, ["a", "--flag", "b c", "-h"]) for command in main.COMMANDS]
    monkeypatch.setattr(module("plot"), "main", lambda argv: ["a list of pictures"])
    assert main.main(["plot"]) == 0
    with pytest.raises(SystemExit):
        main.main(["nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err


def test_env_is_what_a_result_says_about_the_machine(capsys):
    assert module("__main__").main(["env", "--device", "cpu"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"time_utc", "commit", "dirty", "versions", "device", "gpu", "cpu"}
    assert printed["device"] == "cpu"


def sweep(suite="classifier_sizes", sizes=SIZES):
    rates = {"serial": 100.0, "workers": 40.0, "streamed": 110.0, "streamed, fused": 300.0}
    rows = [
        {
            "name": name,
            "batch_size": size,
            "steps_per_s": rate / size,
            "images_per_s": rate,
            "ratio": rate / 100.0,
            "ratio_low": rate / 110.0,
            "ratio_high": rate / 90.0,
            "rounds": [rate / size, 1.1 * rate / size],
        }
        for name, rate in rates.items()
        for size in sizes
        if name != "workers" or size < sizes[-1]
    ]
    settings = {"baseline": "serial", "ours": ["streamed", "streamed, fused"], "ceilings": []}
    return results.result(suite, rows=rows, settings=settings, device=CPU)


def test_many_batch_sizes_are_drawn_as_lines():
    figure = module("plot").draw(sweep())
    figure.draw_without_rendering()
    ratios, rates = figure.axes
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["ratio to serial", "images/s"]
    lines = [line for line in ratios.lines if len(line.get_xdata()) > 2]
    assert [list(line.get_xdata()) for line in lines] == [[8, 16, 32], [*SIZES], [*SIZES]], "the baseline is the line at 1"
    assert [set(line.get_ydata()) for line in lines] == [{0.4}, {1.1}, {3.0}]
    assert len(ratios.collections) == 3
    bands = [band.get_paths()[0].vertices[:, 1] for band in ratios.collections]
    assert [(band.min().round(3), band.max().round(3)) for band in bands] == [
        (round(rate / 1.1, 3), round(rate / 0.9, 3)) for rate in (0.4, 1.1, 3.0)
    ]
    assert ratios.get_xscale() == rates.get_xscale() == "log"
    by_name = dict(zip(["serial", "workers", "streamed", "streamed, fused"], rates.lines, strict=True))
    assert list(by_name["streamed"].get_ydata()) == [110.0] * 4
    assert len({line.get_marker() for line in rates.lines}) == len({line.get_color() for line in rates.lines}) == 4
    for name, line in by_name.items():
        red, green, blue = (int(line.get_color()[at : at + 2], 16) for at in (1, 3, 5))
        assert (green > red + 30) == name.startswith("streamed"), line.get_color()
        assert name.startswith("streamed") or max(red, green, blue) - min(red, green, blue) < 20


def test_labels_of_lines_are_apart_from_each_other_and_from_the_lines():
    made = sweep()
    for row in made["rows"]:
        row["images_per_s"] = 100.0 + len(row["name"])  # ends that lie on each other
    figure = module("plot").draw(made)
    figure.draw_without_rendering()
    axis = figure.axes[1]
    assert [text.get_text() for text in axis.texts]
    boxes = [text.get_window_extent() for text in axis.texts]
    frame = axis.get_window_extent()
    for text, own in zip(axis.texts, boxes, strict=True):
        # The extent holds the line to the end of the curve as well.
        left = axis.transAxes.transform(text.xyann)[0]
        assert left > frame.x1
        assert own.x1 <= figure.bbox.x1
    heights = sorted(axis.transAxes.transform(text.xyann)[1] for text in axis.texts)
    text_height = 8 / 72 * figure.dpi
    assert all(above - below > text_height for below, above in itertools.pairwise(heights))
    assert {text.get_text() for text in axis.texts} == {"serial", "workers", "streamed", "streamed, fused"}


@pytest.mark.parametrize("spoil", ["three sizes", "cases", "two rows of a name"])
def test_other_results_stay_bars(spoil):
    made = sweep(sizes=SIZES[:3]) if spoil == "three sizes" else sweep()
    if spoil == "cases":
        for row in made["rows"]:
            row["case"] = "one"
    elif spoil == "two rows of a name":
        made["rows"].append(dict(made["rows"][0]))
    assert not module("curves").fits(made)
    assert module("curves").fits(sweep())
    assert len(module("plot").draw(made).axes) != 2
