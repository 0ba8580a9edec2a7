"""Photographs of installed packages, packed for another machine."""

import pytest
from PIL import Image

from bench import __main__
from bench.data import photographs


def test_photographs_are_packed_and_drawings_are_not(tmp_path, capsys):
    nature = tmp_path / "backgrounds" / "mate" / "nature"
    nature.mkdir(parents=True)
    Image.radial_gradient("L").resize((2000, 1000)).save(nature / "Aqua.jpg")
    Image.radial_gradient("L").save(nature / "Drawing.jpg")
    packed = tmp_path / "packed"
    __main__.main(["photographs", str(packed), "--backgrounds", str(tmp_path / "backgrounds")])
    names = [path.stem for path in photographs.paths(packed)]
    assert {"Aqua", "chelsea", "rocket"} <= set(names)
    assert not {"Drawing", "brick", "grass"} & set(names), "drawings and textures compress unlike photographs"
    assert names == sorted(names)
    assert photographs.read(packed / "Aqua.jpg").size == (photographs.MOST_PX, photographs.MOST_PX // 2)
    assert capsys.readouterr().out.startswith(f"{len(names)} photographs, ")


def test_a_folder_without_photographs_has_a_way_out(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no photographs to read, because .* has none\. Pack some with"):
        photographs.paths(tmp_path)
