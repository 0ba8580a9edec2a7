"""Every Python example of the documentation runs, in order, in one namespace a page."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from support.comparison.replay import left_to_kornia
from support.ops import documented
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from bench.figures import tables
from gpuaug import Stats, StreamedLoader, collate_ragged, fuse
from gpuaug.fusion.lower import refusals, torchvision

ROOT = Path(__file__).parents[2]
IN_FRAMEWORKS = "import transformers\n"
"""Line of an example that needs a package of the extra ``frameworks``, and runs with ``-m frameworks``."""

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BENCHMARKS = [ROOT / "docs" / "benchmarks.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md"))]
TABLE = re.compile(r"^<!-- table: .*? -->\n(.*?)^<!-- end -->", re.MULTILINE | re.DOTALL)
MEASURED = re.compile(
    r"\b\d[\d.,]*\s*(?:%|\u00d7(?!\d)|x\b|[mµ]?s\b|[GM]B/s|images a second|images/s|steps/s|times\b)|\b0\.\d+"
)
"""A figure with the unit of one that was measured."""

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


FRAMEWORKS = ROOT / "docs" / "frameworks.md"
VLM = ROOT / "docs" / "vlm.md"
BUCKET = ROOT / "docs" / "bucket.md"  # tests/frameworks/test_bucket.py runs its examples, from a store
WITH_EXAMPLES = [page for page in PAGES if "```python" in page.read_text() and page not in (FRAMEWORKS, BUCKET, VLM)]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.filterwarnings("ignore:The copy of a batch does not overlap")
@left_to_kornia
def test_examples_run(page):
    run_examples(page, BLOCK.finditer(page.read_text()))


@pytest.mark.parametrize("package", [None, pytest.param("transformers", marks=pytest.mark.frameworks)])
@pytest.mark.filterwarnings("ignore")
def test_examples_with_frameworks_run(package):
    if package:
        pytest.importorskip(package)
    run_examples(
        FRAMEWORKS, (match for match in BLOCK.finditer(FRAMEWORKS.read_text()) if package or IN_FRAMEWORKS not in match[1])
    )


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
def test_examples_with_a_vision_language_model_run():
    pytest.importorskip("transformers")
    names = run_examples(VLM, BLOCK.finditer(VLM.read_text()))
    samples, model = [names["Chats"]()[index] for index in range(4)], names["model"].eval()

    def loss_and_count(samples):
        decode, patches = names["stages"]()
        batch = names["collate"](samples)
        values = patches.transform(decode(batch.pop("images"), device=model.device))._asdict()
        batch |= values if len(values["image_grid_thw"]) else {}
        loss = model(**{name: value.to(model.device) for name, value in batch.items()}, use_cache=False).loss
        return loss.item(), int((batch["labels"] != -100).sum())

    packed, total = loss_and_count(samples)
    alone = [loss_and_count([sample]) for sample in samples]
    assert packed == pytest.approx(sum(loss * count for loss, count in alone) / total, abs=1e-5)


def run_examples(page, matches):
    namespace = {}
    for match in matches:
        line = match.string[: match.start()].count("\n") + 1
        exec(compile("\n" * line + match[1], str(page), "exec"), namespace)
    for value in list(namespace.values()):  # workers of an iterator that becomes garbage are waited for, for five seconds each
        if isinstance(value, StreamedLoader):
            value.close()
        if isinstance(value, DataLoader):
            value._iterator = None
    return namespace


def test_every_example_is_one_that_runs():
    for page in PAGES:
        text = page.read_text()
        assert len(BLOCK.findall(text)) == len(re.findall(r"^\s*(?:```|~~~)\s*(?:py|>>>)", text, re.MULTILINE)), page


def test_no_example_writes_to_a_folder_that_others_write_to():
    folder = re.compile(r"""["']/(?:tmp|var/tmp|dev/shm)""")
    assert [(page, block) for page in PAGES for block in BLOCK.findall(page.read_text()) if folder.search(block)] == []


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_links_and_pictures_lead_somewhere():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())]
    assert [link for link in links if "://" not in link[1] and not (link[0].parent / link[1]).exists()] == []


def test_tables_are_those_of_the_results(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", [ROOT / "README.md", *BENCHMARKS], ids=lambda page: page.name)
def test_figures_are_in_tables_only(page):
    text = page.read_text()
    assert all(table.strip() for table in TABLE.findall(text)), "a table whose result is missing"
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", TABLE.sub("", text), flags=re.MULTILINE | re.DOTALL)
    assert MEASURED.findall(prose) == []


def test_the_front_page_of_the_benchmarks_is_short():
    assert len(TABLE.sub("", BENCHMARKS[0].read_text()).split()) < 1200


def test_every_counter_of_stats_is_explained_once():
    section = (ROOT / "docs" / "profile.md").read_text().split("\n## While training\n")[1].split("\n## ")[0]
    named = [name for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(field.name for field in fields(Stats))


@pytest.mark.parametrize("page", documented.TABLES, ids=lambda page: page.name)
def test_tables_of_modules_and_transforms_are_generated(page):
    assert documented.written(page).findall(page.read_text()) == [documented.TABLES[page]()]


def test_table_of_torchvisions_transforms_states_the_support_of_each():
    section = (ROOT / "docs" / "torchvision.md").read_text().split("\n## Supported transforms\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (\w+)", section, re.MULTILINE)
    said = {name: word for names, word in rows for name in re.findall(r"`([A-Z]\w+)", names)}
    kinds = {name: kind for name, kind in vars(v2).items() if hasattr(kind, "forward") and kind is not v2.Transform}
    wanted = {name: "refused" if name in refusals.UNSUPPORTED else "left" for name in kinds}
    wanted |= {kind.__name__: "applied" for kind in torchvision.TARGET_TRANSFORMS}
    wanted |= {kind.__name__: "nothing" for kind in (*torchvision.IDENTITIES, *torchvision.CONVERSIONS, v2.ToPureTensor)}
    fused = (*torchvision.LOWERED, *torchvision.MIXES, *torchvision.RANDOM_CONTAINERS, v2.Compose)
    wanted |= {kind.__name__: "fused" for kind in fused}
    assert {name: said.get(name) for name in wanted} == wanted


def test_boxes_come_back_from_the_letterbox():
    text = (ROOT / "docs" / "coco.md").read_text()
    names = {"torch": torch, "side": 320}
    exec(re.search(r"^def in_photograph.*?^    return [^\n]*\n", text, re.MULTILINE | re.DOTALL)[0], names)
    letterbox = fuse(v2.Compose([v2.Resize(None, max_size=320), v2.CenterCrop(320)]), ragged=True)
    for height, width in ((480, 640), (333, 500), (640, 481), (1552, 868), (1919, 1080), (321, 1001), (60, 61)):
        boxes = torch.tensor([[0.0, 0.0, width, height], [0.3 * width, 0.4 * height, 0.9 * width, 0.95 * height]])
        photographs = collate_ragged([torch.zeros(3, height, width, dtype=torch.uint8)])
        _, (target,) = letterbox(photographs, [{"boxes": boxes}], data_keys=["input", "targets"])
        expected = torch.cat((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), 1)  # COCO's format
        torch.testing.assert_close(names["in_photograph"](target["boxes"], height, width), expected, rtol=0, atol=0.01)


def test_class_for_lerobot_is_the_same_in_the_page_and_the_example():
    texts = [(ROOT / path).read_text() for path in ("docs/lerobot.md", "examples/robot_policy.py")]
    page, example = (
        re.search(r"^class Chunks.*?^        return sample\n", text, re.MULTILINE | re.DOTALL)[0] for text in texts
    )
    assert page == example


def test_every_guide_is_linked_from_a_page():
    links = {(page.parent / target).resolve() for page in PAGES for target in re.findall(r"\]\(([^)#]+\.md)", page.read_text())}
    guides = {page for page in PAGES if page.parent.name == "docs"} - {ROOT / "docs" / "index.md"}
    assert sorted(str(page) for page in guides - links) == []


def test_docstrings_have_no_markup_that_the_api_page_would_show_as_it_is():
    marked = [path.name for path in (ROOT / "gpuaug").rglob("*.py") if re.search(r":[a-z]+:`", path.read_text())]
    assert marked == []
