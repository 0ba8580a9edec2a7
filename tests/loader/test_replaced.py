"""``max_replaced``: the share of replaced samples beyond which a loader stops, and its statistics and state about them."""

import io
import json
import pickle
import re

import pytest
import torch
from support.files.encoded import encoded
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from gpuaug import ArgumentError, ArgumentTypeError, DecodeError, DecodeStage, StreamedLoader, collate_encoded, read_encoded
from gpuaug.loader import replaced
from gpuaug.loader.inspection import restored_at_end

BATCH, COUNT = 40, 1200


class Files(Dataset):
    """One image again and again; ``missing`` samples have paths where no file is."""

    def __init__(self, folder, missing):
        self.path, self.missing = folder / "image.png", frozenset(missing)
        self.path.write_bytes(encoded(6, 4, "PNG"))

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        path = self.path.with_name(f"missing {index}") if index in self.missing else self.path
        return read_encoded(path), index


def loader(dataset, max_replaced=0.01, *, cls=DataLoader, depth=2, workers=0, **options):
    wrapped = cls(dataset, BATCH, collate_fn=collate_encoded, num_workers=workers)
    stage = DecodeStage(on_error="replace", max_replaced=max_replaced, backend="cpu", threads=1, **options)
    return StreamedLoader(wrapped, [stage], depth=depth, device="cpu", seed=0)


def arrived(streamed, count=None):
    """The first sample of each batch, up to an error, and the error."""
    firsts = []
    try:
        for _, indices in streamed:
            firsts.append(int(indices.min()) // BATCH)
            if len(firsts) == count:
                break
    except DecodeError as error:
        return firsts, error
    return firsts, None


def names(dataset):
    return [str(dataset.path.with_name(f"missing {index}")) for index in sorted(dataset.missing)]


def test_replaced_samples_are_logged_each_time_that_their_number_has_doubled(tmp_path, caplog):
    dataset = Files(tmp_path, range(5, COUNT, BATCH))  # one per batch
    streamed = loader(dataset, 1)
    for _ in range(2):
        assert arrived(streamed) == (list(range(COUNT // BATCH)), None)
    logged = [record.getMessage() for record in caplog.records]
    assert [int(re.search(r"(\d+) in all", text)[1]) for text in logged] == [1, 2, 4, 8, 16, 32]
    assert f"sample 5 ({names(dataset)[0]}): " in logged[0]


@pytest.mark.parametrize(
    ("missing", "share", "last", "cls", "depth"),
    [
        (range(0, 1000, 100), 0.01, None, DataLoader, 2),  # 10 of 1000
        # 12 of the first 1000: the batch with the thousandth sample is not handed over
        (range(0, 1000, 90), 0.01, 24, DataLoader, 2),
        (range(0, 1000, 90), 0.01, 24, StatefulDataLoader, 0),
        ([*range(0, 900, 90), *range(1160, 1163)], 0.01, 29, DataLoader, 0),  # the thirteenth only in the last batch
        ([5], 0, 24, StatefulDataLoader, 2),
        ([1199], 0, 29, StatefulDataLoader, 2),
        (range(1, COUNT, 2), 1, None, StatefulDataLoader, 0),
        (range(0, COUNT, 2), 0.5, None, DataLoader, 2),
        (range(0, COUNT, 2), 0.49, 24, DataLoader, 2),
    ],
)
def test_a_loader_stops_at_the_batch_beyond_the_share(missing, share, last, cls, depth, tmp_path):
    dataset = Files(tmp_path, missing)
    streamed = loader(dataset, share, cls=cls, depth=depth)
    firsts, error = arrived(streamed)
    assert (error is None) == (last is None)
    assert firsts == list(range(COUNT // BATCH if last is None else last))
    handed_over = [name for index, name in zip(sorted(missing), names(dataset), strict=True) if index < len(firsts) * BATCH]
    assert list(streamed.stats().replaced_files) == handed_over
    if error is not None:
        count = sum(index < (last + 1) * BATCH for index in missing)
        assert f"because {count} of {(last + 1) * BATCH} samples could not be decoded, more than max_replaced={share}" in str(
            error
        )


def test_the_share_is_that_of_all_runs_that_a_state_continues(tmp_path):
    dataset = Files(tmp_path, range(0, COUNT, 90))
    whole = arrived(loader(dataset))
    for stops in ([1], [7, 3], [24]):
        streamed, firsts = loader(dataset), []
        for stop in stops:
            firsts += arrived(streamed, stop)[0]
            file = io.BytesIO()
            torch.save(streamed.state_dict(), file)
            streamed = loader(dataset)
            file.seek(0)
            streamed.load_state_dict(torch.load(file, weights_only=True))
            assert streamed.stats().replaced_files.keys() == set(names(dataset)[: -(-len(firsts) * BATCH // 90)])
        copied = pickle.loads(pickle.dumps(streamed))
        for continued in (streamed, copied):
            rest, error = arrived(continued)
            assert (firsts + rest, str(error)) == (whole[0], str(whole[1]))


@pytest.mark.parametrize("workers", [0, 1])
def test_after_the_error_a_run_continues_with_a_larger_share(workers, tmp_path):
    dataset = Files(tmp_path, range(0, COUNT, 90))
    stopped = loader(dataset, workers=workers)
    firsts, error = arrived(stopped)
    assert "Then resume from the last state" in str(error)
    larger = loader(dataset, 0.02, workers=workers)
    larger.load_state_dict(stopped.state_dict())  # strict: the share is no difference of the stage
    assert arrived(larger) == (list(range(len(firsts), COUNT // BATCH)), None)
    assert list(larger.stats().replaced_files) == names(dataset)
    assert larger.state_dict()["replaced"]["samples"] == COUNT


def test_the_share_is_that_of_all_epochs_and_a_file_is_listed_once(tmp_path):
    streamed = loader(Files(tmp_path, range(4)))
    for _ in range(3):
        assert arrived(streamed)[1] is None
    state = streamed.state_dict()["replaced"]
    assert (state["samples"], state["replaced"], len(state["files"])) == (3 * COUNT, 12, 4)
    (tmp_path / "replaced.json").write_text(json.dumps(streamed.stats().replaced_files))
    assert json.loads((tmp_path / "replaced.json").read_text()) == state["files"]


def test_the_list_of_files_in_a_state_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(replaced, "MAX_FILES", 5)
    streamed = loader(Files(tmp_path, range(9)))
    assert arrived(streamed)[1] is None
    assert len(streamed.state_dict()["replaced"]["files"]) == 5
    assert streamed.stats().replaced == streamed.state_dict()["replaced"]["replaced"] == 9


def test_samples_of_several_stages_count_once_and_the_smallest_share_holds():
    good, bad = encoded(6, 4, "PNG"), b"not an image"
    pairs = [(bad if index in (0, 4) else good, bad if index in (0, 8) else good) for index in range(20)]
    batch = collate_encoded(pairs)
    stages = [DecodeStage(on=member, on_error="replace", max_replaced=share) for member, share in ((0, 0.2), (1, 0.149))]
    with pytest.raises(DecodeError, match=r"because 150 of 1000 .*max_replaced=0.149"):
        list(StreamedLoader([batch] * 60, stages, device="cpu"))
    stages[1] = DecodeStage(on=1, on_error="replace", max_replaced=0.15)
    streamed = StreamedLoader([batch] * 60, stages, device="cpu")
    assert len(list(streamed)) == 60
    assert {"sample 4 of batch 7 of epoch 0", "sample 8 of batch 59 of epoch 0"} <= streamed.stats().replaced_files.keys()
    assert streamed.state_dict()["replaced"]["replaced"] == streamed.stats().replaced == 180


def test_states_without_replaced_samples_have_no_entry_and_states_of_older_releases_load(tmp_path):
    plain = StreamedLoader([torch.ones(2)] * 3, device="cpu")
    list(plain)
    assert "replaced" not in plain.state_dict()
    streamed = loader(Files(tmp_path, [3]))
    arrived(streamed, 2)
    state = streamed.state_dict()
    del state["replaced"]
    streamed.load_state_dict(state)
    assert streamed.stats().replaced_files == {}


@pytest.mark.parametrize("entry", [5, {"samples": -1}, {"replaced": 0.5}, {"files": ["a"]}, {"files": {"a": 1}}])
def test_a_damaged_entry_is_refused_and_leaves_the_loader_as_it_is(entry, tmp_path):
    streamed = loader(Files(tmp_path, [3]))
    arrived(streamed, 2)
    state = streamed.state_dict()
    with pytest.raises((ArgumentError, ArgumentTypeError), match="replaced"):
        streamed.load_state_dict({**state, "replaced": entry})
    assert streamed.state_dict() == state


def test_a_measurement_does_not_count(tmp_path):
    streamed = loader(Files(tmp_path, [3]))
    arrived(streamed, 2)
    before = streamed.state_dict()["replaced"]
    with restored_at_end(streamed):
        arrived(streamed, 3)
    assert streamed.state_dict()["replaced"] == before
