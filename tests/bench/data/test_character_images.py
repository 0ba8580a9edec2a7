"""The built-in set of the suite of accuracy."""

from PIL import Image

from bench.data import character_images


def test_every_character_is_in_both_parts_in_sizes_that_differ(character_folder):
    for part, face in (("train", "DejaVuSans"), ("val", "DejaVuSansMono")):
        paths = sorted((character_folder / part).rglob("*.jpg"))
        assert [path.parent.name for path in paths] == sorted(character_images.CLASSES)
        assert {path.stem for path in paths} == {f"{face}_0"}
        sizes = {Image.open(path).size for path in paths}
        assert len(sizes) > 30
        assert all(96 <= side <= 384 for size in sizes for side in size)


def test_parts_share_no_face_and_no_photograph(tmp_path, monkeypatch):
    assert not set(character_images.TYPEFACES["train"]) & set(character_images.TYPEFACES["val"])
    plain = [Image.new("RGB", (150, 150), colour) for colour in ("red", "lime", "blue")]
    monkeypatch.setattr(character_images, "_photographs", lambda: plain)
    character_images.make(tmp_path, copies=1, typefaces=1)
    corners = {part: {colour_at_corner(path) for path in (tmp_path / part).rglob("*.jpg")} for part in ("train", "val")}
    assert corners == {"train": {"red", "green"}, "val": {"blue"}}


def colour_at_corner(path):
    with Image.open(path) as image:
        pixel = image.getpixel((0, 0))
    return ("red", "green", "blue")[pixel.index(max(pixel))]
