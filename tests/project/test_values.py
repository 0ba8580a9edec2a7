"""The messages of ``assert_values``, and the rule that tests of pixels compare tensors by it."""

import ast
import re

import kornia.augmentation as K
import pytest
import torch
from support.comparison.replay import photographs
from support.comparison.values import assert_values, difference
from support.messages.finder import ROOT, nodes

import gpuaug

TESTS = ("tests/fusion", "tests/gpu", "tests/fuzz", "tests/contract", "tests/support")
EQUAL = re.compile(r"^(all\()?\(?(map\()?torch\.(equal|allclose)\b|\.allclose\(")
CLOSE = re.compile(r" - .*\)\.abs\(\).*(\.max|\.float\(\)\.mean|\.all)\(\)")
"""Conditions that tests must not assert: the message of a failure would be the digits of tensors, or one number."""
COMPARED = re.compile(r"torch\.equal\b|\ballclose\b|\babs\b")
"""Text of each file that has such a condition: other files are not parsed."""


def test_a_failure_says_where_and_by_how_much():
    wanted = photographs(8, 3, 20, 24, dtype=torch.float32)
    got = wanted.clone()
    got[3, 1, 17, 4] += 0.25
    got[3, 1, 17, 5] -= 0.125
    got[5, 0, 0, 0] += 0.0625
    text = difference(got, wanted, atol=1e-5)
    one, other = (f"{each[3, 1, 17, 4].item():.4g}" for each in (got, wanted))
    assert text == (
        f"sample 3, channel 1, row 17, column 4: got {one}, wanted {other} "
        "(largest difference 0.25; 3 of 11520 values of 2 of 8 samples differ by more than 1e-05)"
    )
    with pytest.raises(AssertionError, match=r"^behind a crop: sample 3, .* more than 0\.1, 0\.0% may\)$"):
        assert_values(got, wanted, atol=0.1, share=1e-4, about="behind a crop")
    assert not difference(got, wanted, atol=0.1, share=2e-4)
    assert not difference(got, wanted, atol=0.25)


def test_a_failure_says_what_the_sample_drew():
    images = photographs(4)
    augment = gpuaug.fuse(K.AugmentationSequential(K.RandomContrast((0.5, 2.0), p=1.0), K.RandomInvert(p=1.0)))
    draws = augment.draw(images.shape, seed=0)
    wanted = augment(images, draws=draws)
    got = wanted.clone()
    got[2] *= 0.5
    factor = draws.of(2)["RandomContrast_0"]["contrast_factor"]
    text = rf"^sample 2, .*\)\. Sample 2 drew RandomContrast_0\(contrast_factor={factor:.5g}\), RandomInvert_1\(\)\.$"
    with pytest.raises(AssertionError, match=text):
        assert_values(got, wanted, draws=draws)


@pytest.mark.parametrize(
    ("got", "wanted", "options", "text"),
    [
        (torch.ones(2, 3), torch.ones(3), {"atol": 1.0}, r"got the shape torch.Size\(\[2, 3\]\), wanted torch.Size\(\[3\]\)"),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), {}, "got the dtype torch.float32, wanted torch.float64"),
        (torch.ones(3), torch.ones(3, device="meta"), {}, "got the device cpu, wanted meta"),
        (torch.tensor([0, torch.nan]), torch.tensor([0, torch.nan]), {"atol": 1.0}, r"index \(1,\): got nan, wanted nan"),
        (
            torch.tensor([1.0, torch.nan]),
            torch.tensor([9, 0.0]),
            {"equal_nan": True},
            r"index \(1,\): got nan, wanted 0 .*; 2 of 2",
        ),
        (torch.tensor([torch.inf]), torch.tensor([1.0]), {"atol": 9.0}, r"index \(0,\): got inf, wanted 1"),
        (torch.tensor([[True, True]]), torch.tensor([[True, False]]), {}, r"index \(0, 1\): got 1, wanted 0"),
        (torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([1, 255], dtype=torch.uint8), {}, "got 0, wanted 1"),
        (torch.tensor(1.0), torch.tensor(1.0000001), {}, "the number: got 1, wanted 1.0000001"),
        (torch.tensor([8.0]), torch.tensor([10.0]), {"atol": 0.5, "rtol": 0.1}, r"more than 0\.5 \+ 0\.1 of the wanted value"),
        (
            torch.tensor([torch.inf, torch.nan, 2.0]),
            torch.tensor([torch.inf, torch.nan, 2.1]),
            {"atol": 0.2, "equal_nan": True},
            "^$",
        ),
        (torch.ones(0, 3), torch.ones(0, 3), {}, "^$"),
        (torch.tensor([9.0]), torch.tensor([10.0]), {"rtol": 0.1}, "^$"),
    ],
)
def test_differences_are_seen_and_told(got, wanted, options, text):
    assert re.search(text, difference(got, wanted, **options))


def conditions(test):
    """The conditions that an ``assert`` joins by ``and`` and ``or``, and those that it chooses from."""
    if isinstance(test, ast.BoolOp | ast.IfExp):
        for part in test.values if isinstance(test, ast.BoolOp) else (test.body, test.orelse):
            yield from conditions(part)
    else:
        yield test


def test_tests_of_pixels_compare_tensors_by_assert_values():
    paths = [path for folder in TESTS for path in sorted((ROOT / folder).rglob("*.py")) if COMPARED.search(path.read_text())]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(part)}"
        for path in paths
        for node in nodes(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
        for part in conditions(node.test)
        if not isinstance(part, ast.UnaryOp)
        if CLOSE.search(text := ast.unparse(part)) or (isinstance(part, ast.Call) and EQUAL.search(text))
    ]
    assert not found, "a failure would not say where it is; call assert_values of support/comparison/values.py: " + "; ".join(
        found
    )
