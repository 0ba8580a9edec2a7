"""Accelerate with ``StreamedLoader(accelerator.prepare(loader))``: what it counts, where it steps and what it saves."""

from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from support.process.waiting import until
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

import gpuaug
from gpuaug.feed.mailbox import QUEUED


@pytest.fixture
def make_accelerator():
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    def make(**settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return accelerate.Accelerator(cpu=True, **settings)

    return make


def dataset(samples):
    return TensorDataset(torch.arange(float(samples)))


class Order(SequentialSampler):
    """Notes when it was read to its end."""

    ended = False

    def __iter__(self):
        yield from super().__iter__()
        self.ended = True


class StartsAgain(IterableDataset):
    """A dataset that is its own iterator, and starts again when it is read after its end."""

    position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == 3:
            self.position = 0
            raise StopIteration
        self.position += 1
        return self.position


def test_epoch_ends_although_the_dataset_would_start_again(make_accelerator):
    loader = gpuaug.StreamedLoader(make_accelerator().prepare(DataLoader(StartsAgain(), None)), device="cpu")
    for _ in range(2):
        assert list(islice(loader, 10)) == [1, 2, 3]


@pytest.mark.parametrize("depth", [0, 2, 4])
@pytest.mark.parametrize("samples", [100, 96, 5])
def test_all_samples_are_gathered_for_metrics(make_accelerator, samples, depth):
    accelerator, order = make_accelerator(), Order(range(samples))
    prepared = accelerator.prepare(DataLoader(dataset(samples), 8, sampler=order))
    loader = gpuaug.StreamedLoader(prepared, depth=depth)
    gathered = []
    for number, (values,) in enumerate(loader, start=1):
        if depth == 0 and number == len(loader) - QUEUED:
            until(lambda: order.ended)  # the last batch has been read, and waits
        gathered += accelerator.gather_for_metrics(values).tolist()
    assert gathered == list(range(samples))


@pytest.mark.parametrize("depth", [0, 2])
def test_gradients_are_stepped_after_each_window_and_at_the_end(make_accelerator, depth):
    accelerator = make_accelerator(gradient_accumulation_steps=4)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = gpuaug.StreamedLoader(accelerator.prepare(DataLoader(dataset(20), 2)), depth=depth)
    for _epoch in range(2):
        stepped = []
        for number, _ in enumerate(loader):
            with accelerator.accumulate(model):
                stepped += [number] if accelerator.sync_gradients else []
        assert stepped == [3, 7, 9]


def test_an_evaluation_that_is_left_early_gives_the_end_back_to_training(make_accelerator):
    accelerator = make_accelerator()
    training, evaluation = (gpuaug.StreamedLoader(accelerator.prepare(DataLoader(dataset(6), 2))) for _ in range(2))
    ends = []
    for _ in training:
        for _ in evaluation:
            break
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert ends == [False, False, True]
    assert not accelerator.gradient_state.in_dataloader


def noisy(noise, accelerator, **settings):
    shuffled = DataLoader(dataset(40), 2, shuffle=True, generator=torch.Generator().manual_seed(5), **settings)
    return gpuaug.StreamedLoader(accelerator.prepare(shuffled), [noise], seed=1)


def epochs_of(loader, count):
    return [[images.tolist() for (images,) in loader] for _ in range(count)]


SAVED = {
    "registered": ({"use_seedable_sampler": False}, True),
    "registered, seedable": ({"use_seedable_sampler": True}, True),
    "stateful": ({"use_seedable_sampler": True, "use_stateful_dataloader": True}, False),
    "stateful, registered": ({"use_seedable_sampler": True, "use_stateful_dataloader": True}, True),
    "stateful, not seedable": ({"use_seedable_sampler": False, "use_stateful_dataloader": True}, False),
}


@pytest.mark.parametrize(("configuration", "registered"), SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("at", [12, 20])
def test_save_state_goes_on_with_the_batch_after_that_of_the_loop(
    make_accelerator, noise, tmp_path, at, configuration, registered
):
    def make():
        from accelerate.utils import DataLoaderConfiguration

        accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(**configuration))
        loader = noisy(noise, accelerator)
        if registered:
            accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    torch.manual_seed(3)
    whole = epochs_of(make()[1], 3)
    torch.manual_seed(3)
    accelerator, loader = make()
    first = epochs_of(loader, 1)
    for number, _ in enumerate(loader, start=1):
        if number == at:
            accelerator.save_state(tmp_path)
    assert first == whole[:1]
    torch.manual_seed(3)
    accelerator, loader = make()
    accelerator.load_state(tmp_path)
    rest, following = epochs_of(loader, 2) if at < 20 or registered else ([], *epochs_of(loader, 1))
    assert (rest, following) == (whole[1][at:], whole[2])


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_first_batches_are_skipped_with_their_draws(make_accelerator, noise, seedable, workers):
    import accelerate

    from gpuaug.integrations.accelerate import skip_first_batches

    def make():
        torch.manual_seed(3)
        configuration = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator = make_accelerator(dataloader_config=configuration)
        return accelerator, noisy(noise, accelerator, num_workers=workers)

    whole = epochs_of(make()[1], 2)
    _, loader = make()
    skipped = skip_first_batches(loader, 12)
    skipped.set_epoch(0)  # as the Trainer of transformers does
    assert epochs_of(skipped, 1) == [whole[0][12:]]
    assert epochs_of(loader, 1) == [whole[1]]
    accelerator, loader = make()
    wrapped_after = gpuaug.StreamedLoader(accelerator.skip_first_batches(loader.loader, 12), loader.stages, seed=1)
    assert epochs_of(wrapped_after, 1) == [whole[0][12:]]


def test_other_loaders_are_skipped_by_accelerate(make_accelerator):
    from gpuaug.integrations.accelerate import skip_first_batches

    prepared = make_accelerator().prepare(DataLoader(dataset(8), 2))
    assert [values.tolist() for (values,) in skip_first_batches(prepared, 3)] == [[6, 7]]


def test_accelerate_itself_cannot_skip_what_has_stages(make_accelerator, noise):
    accelerator = make_accelerator()
    with pytest.raises(
        gpuaug.ArgumentError, match=r"would make a DataLoader without the stages. .* call gpuaug.integrations.accelerate"
    ):
        accelerator.skip_first_batches(noisy(noise, accelerator), 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0))


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_stream_is_counted_and_skipped(make_accelerator, noise, dispatch):
    from accelerate.utils import DataLoaderConfiguration

    accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    prepared = accelerator.prepare(DataLoader(Stream(), 2))
    loader = gpuaug.StreamedLoader(prepared, [noise], seed=1)
    whole, ends = [], []
    for images in loader:
        whole.append(images.tolist())
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert ends == [False] * 4 + [True]
    skipped = gpuaug.StreamedLoader(accelerator.skip_first_batches(prepared, 3), [noise], seed=1)
    skipped.set_epoch(0)
    assert [images.tolist() for images in skipped] == whole[3:]


def test_a_loader_that_sends_batches_between_ranks_is_refused(make_accelerator):
    from accelerate.utils import DataLoaderConfiguration

    accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    prepared = accelerator.prepare(DataLoader(Stream(), 2))
    prepared.state = SimpleNamespace(num_processes=2)
    with pytest.raises(gpuaug.ArgumentError, match="a loader that each rank reads by itself, got a DataLoaderDispatcher"):
        gpuaug.StreamedLoader(prepared)


@pytest.mark.parametrize("feed", ["plain", "ring"])
def test_workers_of_a_prepared_loader_fill_slots(make_accelerator, feed):
    accelerator = make_accelerator()
    loader = gpuaug.StreamedLoader(accelerator.prepare(DataLoader(dataset(100), 4, num_workers=2)), feed=feed)
    for _epoch in range(2):
        gathered = [accelerator.gather_for_metrics(values) for (values,) in loader]
        assert torch.cat(gathered).tolist() == list(range(100))
    assert feed in repr(loader)
    assert (loader.stats().slot_batches > 0) == (feed == "ring")


class Failing(TensorDataset):
    def __getitem__(self, index):
        if index == 6:
            raise ZeroDivisionError("sample 6")
        return super().__getitem__(index)


def test_an_error_is_raised_at_its_own_batch(make_accelerator):
    loader = gpuaug.StreamedLoader(make_accelerator().prepare(DataLoader(Failing(torch.arange(10.0)), 2)))
    seen = []
    with pytest.raises(ZeroDivisionError, match="sample 6") as raised:
        seen += [values.tolist() for (values,) in loader]
    assert "batch 3" in raised.value.__notes__[0]


def test_what_profile_reads_does_not_count(make_accelerator, noise):
    accelerator = make_accelerator()
    expected = epochs_of(noisy(noise, accelerator), 1)
    loader = noisy(noise, accelerator)
    gpuaug.profile(loader, lambda batch: None, batches=8)
    assert not accelerator.gradient_state.in_dataloader
    assert epochs_of(loader, 1) == expected


@pytest.mark.parametrize(("samples", "steps", "warned"), [(10, 3, True), (12, 3, False), (10, 1, False)])
def test_a_loader_that_accelerate_gives_back_is_warned_of(make_accelerator, samples, steps, warned):
    accelerator = make_accelerator(gradient_accumulation_steps=steps)
    loader = accelerator.prepare(gpuaug.StreamedLoader(DataLoader(dataset(samples), 2)))
    text = "because Accelerate accumulates gradients and has not prepared"
    with pytest.warns(gpuaug.GpuAugWarning, match=text) if warned else nullcontext():
        list(loader)
    with torch.no_grad():
        list(loader)


def test_batches_go_where_accelerate_puts_them(make_accelerator):
    prepared = make_accelerator().prepare(DataLoader(dataset(4), 2))
    prepared.device = torch.device("meta")
    assert gpuaug.StreamedLoader(prepared, device="cpu").device.type == "cpu"
    with pytest.raises(gpuaug.DeviceError):
        gpuaug.StreamedLoader(prepared)
