"""The built-in set of the suite of accuracy."""

import pytest
from PIL import Image

from bench.data import character_images


def files(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.jpg")}


def test_every_character_is_in_both_parts_in_sizes_that_differ(character_folder):
    for part, face in (("train", "DejaVuSans"), ("val", "DejaVuSansMono")):
        paths = sorted((character_folder / part).rglob("*.jpg"))
        assert [path.parent.name for path in paths] == sorted(character_images.CLASSES)
        assert {path.stem for path in paths} == {f"{face}_0"}
        sizes = {Image.open(path).size for path in paths}
        assert len(sizes) > 30
        assert all(96 <= side <= 384 for size in sizes for side in size)


def test_parts_share_no_face_and_no_photograph(tmp_path, monkeypatch):
    assert not set(character_images.FACES["train"]) & set(character_images.FACES["val"])
    plain = [Image.new("RGB", (150, 150), colour) for colour in ("red", "lime", "blue")]
    monkeypatch.setattr(character_images, "_photographs", lambda: plain)
    character_images.make(tmp_path, copies=1, faces=1)
    corners = {part: {colour_at_corner(path) for path in (tmp_path / part).rglob("*.jpg")} for part in ("train", "val")}
    assert corners == {"train": {"red", "green"}, "val": {"blue"}}


def colour_at_corner(path):
    with Image.open(path) as image:
        pixel = image.getpixel((0, 0))
    return ("red", "green", "blue")[pixel.index(max(pixel))]


def test_the_same_arguments_give_the_same_images_and_characters_stand_out(character_folder, tmp_path):
    character_images.make(tmp_path, copies=1, faces=1)
    assert files(tmp_path) == files(character_folder)
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    for seed in range(20):
        image = character_images._image("H", "DejaVuSans", grey, character_images.Random(seed)).convert("L")
        assert max(abs(level - 128) for level in image.getextrema()) >= 45
        drawn = sum(abs(level - 128) > 20 for level in image.tobytes())
        assert 0.01 < drawn / (image.width * image.height) < 0.5


def test_an_installation_without_photographs_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(character_images.resources, "files", lambda _: tmp_path)
    with pytest.raises(FileNotFoundError, match="too few photographs, because scikit-image has 0"):
        character_images.make(tmp_path / "set", copies=1, faces=1)
