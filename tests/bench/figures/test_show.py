import torch
from PIL import Image

from bench.figures import show


def test_objects_lie_within_their_boxes_and_points_on_the_picture():
    (batch,) = show.Objects(96)
    assert batch["image"].shape == (4, 3, 96, 96)
    for box, mask, point, label in zip(*(batch[name] for name in ("boxes", "masks", "points", "labels")), strict=True):
        assert label.max() < len(show.CLASSES)
        assert (point >= 0).all()
        assert (point < 96).all()
        for (left, top, right, bottom), covers in zip(box.int().tolist(), mask, strict=True):
            assert covers.sum() == covers[top : bottom + 1, left : right + 1].sum() > 0
            assert all(side.any() for side in (covers[top], covers[bottom], covers[:, left], covers[:, right]))


def test_an_ellipse_is_turned_clockwise():
    mask = show._inside(show.Ellipse("", 10, 10, 9, 2, 45), torch.arange(20.0), torch.arange(20.0)[:, None])
    assert mask[15, 15], "x goes right and y goes down"
    assert not mask[5, 15]


def test_pictures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    targets = show.main(["--images", str(tmp_path), "--side", "24"])
    assert [target.name for target in targets] == ["show_classification.png", "show_detection.png", "show_mixup.png"]
    for target in targets:
        with Image.open(target) as image:
            assert image.width > 900
