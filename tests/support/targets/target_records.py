"""Lists of target dicts of any form that a dataset may give, for property tests."""

import pytest
import torch
from hypothesis import strategies as st
from torchvision import tv_tensors

from gpuaug.core import packed_targets
from gpuaug.core.targets import PackedTargets

HEIGHT, WIDTH = 8, 10

FORMS = {"XYXY": (1, 2, 6, 7), "XYWH": (1, 2, 5, 5), "CXCYWH": (4, 5, 4, 4)}


def boxes_of(n, seed, form):
    draw = torch.Generator().manual_seed(seed)
    return torch.tensor(FORMS[form], dtype=torch.float32) + torch.rand(n, 4, generator=draw) * 6 - 2


@st.composite
def records(draw, keys=()):
    """A list of dicts: of any number of objects each, typed or not, all with the same keys or not.

    Args:
        draw: Hypothesis'.
        keys: Of target dicts, all of which the dicts have; else any may be left out.
    """
    form, typed, dtype = draw(st.sampled_from(sorted(FORMS))), draw(st.booleans()), draw(st.sampled_from(DTYPES))
    alike, planes = draw(st.booleans()), draw(st.sampled_from([2, 3]))
    kept = draw(st.sets(st.sampled_from(NAMES)))
    made = []
    for sample in range(draw(st.integers(1, 5))):
        n, seed = draw(st.integers(0, 3)), draw(st.integers(0, 9))
        record = {
            "boxes": boxes_of(n, seed, form).to(dtype),
            "labels": torch.arange(n) + 10 * sample,
            "masks": (torch.arange(n * HEIGHT * WIDTH) % 7).view(n, HEIGHT, WIDTH).to(torch.uint8),
            "keypoints": boxes_of(n * 5, seed, "XYXY")[:, :planes].reshape(n, 5, planes).contiguous(),
            "valid": torch.arange(n) % 2 == 0,
            "area": torch.rand(n),
            "image_id": sample,
            "size": torch.tensor([HEIGHT, WIDTH]),
            "scale": torch.tensor(0.5),
            "names": [f"object {index}" for index in range(n)],
        }
        if typed:
            sizes = {"canvas_size": (HEIGHT, WIDTH)}
            record["boxes"] = tv_tensors.BoundingBoxes(record["boxes"], format=form, **sizes)
            record["masks"] = tv_tensors.Mask(record["masks"])
            if planes == 2:
                record["keypoints"] = tv_tensors.KeyPoints(record["keypoints"], **sizes)
            record["others"] = tv_tensors.BoundingBoxes(boxes_of(n, seed + 1, form), format=form, **sizes)
        left_out = set(NAMES) - (kept if alike else draw(st.sets(st.sampled_from(NAMES)))) - set(keys)
        order = list(record) if alike else draw(st.permutations(list(record)))
        made.append({name: record[name] for name in order if name not in left_out})
    return made


DTYPES = [torch.float32, torch.float32, torch.float64, torch.int64]
NAMES = ["boxes", "labels", "masks", "keypoints", "valid", "area", "image_id", "size", "scale", "names", "others"]

RECORDS = records()


def packed(given_records):
    """The dicts as a stage gets them from the copy lane, however few tensors they hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_targets, "MIN_PACKED_TENSORS", 1)
        (made,) = packed_targets.pack_targets([given_records], lambda shape, dtype: None)
    assert type(made) is PackedTargets
    return made
