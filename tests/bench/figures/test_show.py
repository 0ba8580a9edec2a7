from PIL import Image

from bench.figures import show


def test_pictures_are_drawn(tmp_path, photograph_cache):
    targets = show.main(["--images", str(tmp_path), "--side", "24"])
    assert [target.name for target in targets] == ["show_classification.png", "show_detection.png", "show_mixup.png"]
    for target in targets:
        with Image.open(target) as image:
            assert image.width > 900
