"""The suite of accuracy: its set, its folders, and that rows differ in nothing but who augments."""

import importlib
import json
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from PIL import Image

from gpuaug.benchkit import results

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kornia")
pytest.importorskip("skimage")

NAMES = ["torchvision, workers", "gpuaug, antialiased", "gpuaug"]
TINY = ["--device", "cpu", "--size", "32", "--batch", "8", "--epochs", "1", "--repeats", "1", "--workers", "0"]


def module(name):
    return importlib.import_module(f"bench.{name}")


@pytest.fixture(scope="module")
def glyph_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("glyphs")
    module("glyphs").make(root, copies=1, faces=1)
    return root


def files(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.jpg")}


def test_every_character_is_in_both_parts_in_sizes_that_differ(glyph_folder):
    glyphs = module("glyphs")
    for part, face in (("train", "DejaVuSans"), ("val", "DejaVuSansMono")):
        paths = sorted((glyph_folder / part).rglob("*.jpg"))
        assert [path.parent.name for path in paths] == sorted(glyphs.CLASSES)
        assert {path.stem for path in paths} == {f"{face}_0"}
        sizes = {Image.open(path).size for path in paths}
        assert len(sizes) > 30
        assert all(96 <= side <= 384 for size in sizes for side in size)


def test_parts_share_no_face_and_no_photograph(tmp_path, monkeypatch):
    glyphs = module("glyphs")
    assert not set(glyphs.FACES["train"]) & set(glyphs.FACES["val"])
    plain = [Image.new("RGB", (150, 150), colour) for colour in ("red", "lime", "blue")]
    monkeypatch.setattr(glyphs, "_photographs", lambda: plain)
    glyphs.make(tmp_path, copies=1, faces=1)
    corners = {part: {colour_at_corner(path) for path in (tmp_path / part).rglob("*.jpg")} for part in ("train", "val")}
    assert corners == {"train": {"red", "green"}, "val": {"blue"}}


def colour_at_corner(path):
    with Image.open(path) as image:
        pixel = image.getpixel((0, 0))
    return ("red", "green", "blue")[pixel.index(max(pixel))]


def test_the_same_arguments_give_the_same_images_and_characters_stand_out(glyph_folder, tmp_path):
    glyphs = module("glyphs")
    glyphs.make(tmp_path, copies=1, faces=1)
    assert files(tmp_path) == files(glyph_folder)
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    for seed in range(20):
        image = glyphs._image("H", "DejaVuSans", grey, glyphs.Random(seed)).convert("L")
        assert max(abs(level - 128) for level in image.getextrema()) >= 45
        drawn = sum(abs(level - 128) > 20 for level in image.tobytes())
        assert 0.01 < drawn / (image.width * image.height) < 0.5


def test_an_installation_without_photographs_says_what_to_do(tmp_path, monkeypatch):
    glyphs = module("glyphs")
    monkeypatch.setattr(glyphs.resources, "files", lambda _: tmp_path)
    text = (
        r"scikit-image must ship its photographs in .*, got \d+ of them\. Install it from a wheel, or pass a folder of your "
        r"own with --data\."
    )
    with pytest.raises(FileNotFoundError, match=text):
        glyphs.make(tmp_path / "set", copies=1, faces=1)


def test_a_folder_is_split_the_same_way_every_time(class_folder):
    folders = module("folders")
    first, second = folders.parts(class_folder), folders.parts(class_folder)
    assert first.classes == ["cat", "dog"]
    assert (len(first.train), len(first.val)) == (19, 5)
    assert not set(first.train.samples) & set(first.val.samples)
    assert first.val.samples == second.val.samples


def test_train_and_val_are_taken_as_they_are(glyph_folder):
    made = module("folders").parts(glyph_folder)
    assert made.classes == sorted(module("glyphs").CLASSES)
    assert {Path(path).parts[-3] for path, _ in made.train.samples} == {"train"}
    assert {Path(path).parts[-3] for path, _ in made.val.samples} == {"val"}


def test_parts_of_different_classes_are_refused(tmp_path):
    for part, names in (("train", "ab"), ("val", "ac")):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "0.png")
    text = r"train and val must have the same classes, got 2 and 2 in .*, of which 2 are in one alone\. Add or remove"
    with pytest.raises(ValueError, match=text):
        module("folders").parts(tmp_path)


def test_images_in_memory_are_those_in_the_files_and_are_tested_in_the_middle(class_folder):
    folders = module("folders")
    images = folders.parts(class_folder).train
    held = images.in_memory()
    for index in (0, 7):
        assert torch.equal(images[index][0], held[index][0])
        assert images[index][1] == held[index][1] == images.samples[index][1]
    scene = torch.zeros(3, 64, 128, dtype=torch.uint8)
    scene[:, :, 30:98] = 255
    found, labels = folders.tested(folders.Images([("", 1)], [scene]), 32)
    assert found.shape == (1, 3, 32, 32)
    assert labels.tolist() == [1]
    white = (1 - torch.tensor(folders.MEAN)) / torch.tensor(folders.STD)
    assert (found[0].mean((1, 2)) - white).abs().max() < 1e-4


def test_all_rows_have_the_same_images_in_the_same_order(class_folder):
    accuracy, folders = module("accuracy"), module("folders")
    images = folders.parts(class_folder).train
    # As their own labels: what a row does to an image leaves them alone.
    numbered = folders.Images([(path, index) for index, (path, _) in enumerate(images.samples)])
    options = Namespace(device=torch.device("cpu"), size=16, batch=(4,), workers=0)
    orders = {}
    for name in NAMES:
        with ExitStack() as stack:
            batches = accuracy.batches(name, numbered, 5, options, stack)
            orders[name] = [[labels.tolist() for _, labels in batches] for _ in range(2)]
            shapes = {tuple(some.shape) for some, _ in batches}
        assert shapes == {(4, 3, 16, 16)}
    assert orders[NAMES[0]] == orders[NAMES[1]] == orders[NAMES[2]]
    first, second = orders[NAMES[0]]
    assert len(first) == 19 // 4
    assert first != second, "an epoch of its own order"


def test_trains_every_row_and_says_how_well(class_folder, tmp_path, capsys):
    path = tmp_path / "accuracy.json"
    assert module("__main__").main(["accuracy", *TINY, "--data", str(class_folder), "--json", str(path)]) == 0
    made = json.loads(path.read_text())
    results.check(made)
    assert [row["name"] for row in made["rows"]] == NAMES
    for row in made["rows"]:
        assert row["top1_low_percent"] <= row["top1_percent"] <= row["top1_high_percent"]
        assert row["top1_percent"] % 20 == pytest.approx(0, abs=1e-4), "of five images"
        assert min(row["images_per_s"], row["wall_s"], row["ratio"]) > 0
    said = made["settings"]
    assert (said["images"], said["train_images"], said["val_images"], said["classes"]) == ("the user's", 19, 5, 2)
    assert (said["epochs"], said["repeats"], said["batch"]) == (1, 1, [8])
    assert "data" not in said, "a path says nothing"
    assert "accuracy: seed 0, gpuaug, antialiased: " in capsys.readouterr().out


def test_make_writes_the_set_and_trains_nothing(tmp_path, monkeypatch):
    accuracy = module("accuracy")
    monkeypatch.setattr(accuracy, "train", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr(accuracy.glyphs, "CLASSES", "AB")
    monkeypatch.setattr(accuracy.glyphs, "FACES", {"train": ["DejaVuSans", "STIXGeneral"], "val": ["cmr10"]})
    assert accuracy.main(["--device", "cpu", "--make", str(tmp_path / "set")]) is None
    made = module("folders").parts(tmp_path / "set")
    assert (len(made.train), len(made.val), made.classes) == (2 * 2 * 10, 2 * 3, ["A", "B"])


@pytest.fixture
def pretended(monkeypatch, tmp_path, class_folder):
    """The suite over three seeds, where the trainings are over at once."""
    accuracy, ran = module("accuracy"), []

    def train(name, parts, test, seed, options):
        ran.append((seed, name))
        number = NAMES.index(name)
        rates = ((100, 110, 120), (200, 200, 200), (300, 250, 340))[number]
        return {"top1_percent": 70.0 + number + 3 * seed, "images_per_s": float(rates[seed]), "wall_s": 5.0 + seed}

    monkeypatch.setattr(accuracy, "train", train)
    monkeypatch.setattr(accuracy.common, "release", lambda device: None)
    path = tmp_path / "results" / "accuracy.json"
    made = accuracy.main([*TINY, "--repeats", "3", "--data", str(class_folder), "--json", str(path)])
    return made, ran, path


def test_figures_are_of_all_seeds_and_ratios_of_one(pretended):
    made, ran, _ = pretended
    assert [name for seed, name in ran if seed == 0] == NAMES
    assert [name for seed, name in ran if seed == 1] == NAMES[::-1]
    baseline, _, plain = made["rows"]
    assert (plain["top1_percent"], plain["top1_low_percent"], plain["top1_high_percent"]) == (75.0, 72.0, 78.0)
    assert (plain["images_per_s"], plain["rounds"], plain["wall_s"]) == (300.0, [300.0, 250.0, 340.0], 6.0)
    assert plain["ratio"] == pytest.approx(340 / 120), "that of the medians is 300 / 110"
    assert (plain["ratio_low"], plain["ratio_high"]) == (pytest.approx(250 / 110), 3.0)
    assert baseline["ratio"] == 1


def test_table_and_picture_show_top_1(pretended, tmp_path):
    _, _, path = pretended
    page = tmp_path / "page.md"
    page.write_text("<!-- table: accuracy -->\n<!-- end -->\n")
    assert module("tables").main([str(page), "--results", str(path.parent)]) == 0
    shown = page.read_text()
    assert "| name | top-1, % | top-1 low, % | top-1 high, % | images/s | ratio | wall, s |" in shown
    assert "| gpuaug | 75 | 72 | 78 | 300 | 2.83 | 6 |" in shown
    assert "In brackets" not in shown
    figure = module("plot").draw(json.loads(path.read_text()))
    (axis,) = figure.axes
    assert axis.get_xlabel() == "top-1, %"
    assert [bar.get_width() for bar in axis.patches] == [73, 74, 75]
    whiskers = [tuple(line[:, 0]) for lines in axis.collections for line in lines.get_segments()]
    assert whiskers == [(70, 76), (71, 77), (72, 78)]


def test_rows_that_are_not_there_are_refused():
    with pytest.raises(SystemExit, match=r"--rows must be among torchvision, workers; .*, got Kornia\."):
        module("accuracy").main([*TINY, "--rows", "Kornia"])


def test_top_1_is_the_share_of_right_answers():
    class Answers(torch.nn.Module):
        def forward(self, images):
            return torch.nn.functional.one_hot(images[:, 0].long(), 4).float()

    images, labels = torch.tensor([[0.0], [1.0], [2.0], [3.0]]).repeat(100, 1), torch.tensor([0, 1, 2, 0]).repeat(100)
    assert module("accuracy").top1_percent(Answers(), (images, labels), None) == 75
