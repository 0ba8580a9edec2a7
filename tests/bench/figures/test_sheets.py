import pytest
import torch
from PIL import Image

from bench.figures import sheets


@pytest.mark.parametrize("name", sheets.SHEETS)
def test_kornia_and_fuse_agree_where_the_sheets_show_it(name):
    images = torch.randint(0, 256, (2, 3, 24, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    comparison = sheets.compare(sheets.SHEETS[name](24), images)
    assert comparison.kornia.shape == comparison.fused.shape == images.shape
    assert comparison.difference.max() < 1e-4
    assert (comparison.masks is not None) == (name == "segmentation")
    if comparison.masks:
        source, kornia, fused = comparison.masks
        assert 0 < source.float().mean() < 1
        assert torch.equal(kornia, fused)
        assert comparison.label.endswith("masks: 0 pixels differ")


def test_a_sheet_is_drawn(tmp_path, photograph_cache):
    (target,) = sheets.main(["--only", "segmentation", "--images", str(tmp_path), "--side", "16", "--device", "cpu"])
    assert target == tmp_path / "sheet_segmentation.png"
    with Image.open(target) as image:
        width, height = image.size
        assert width > 5 * 16
        assert height > 4 * 16
        assert image.getpixel((width - 10, height - 10)) == (0, 0, 0)
