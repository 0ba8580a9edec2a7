import pytest
import torch

from gpuaug import ArgumentError
from gpuaug.benchkit import windows
from gpuaug.benchkit.windows import Variant, Window, interleave, summarise, synchronize

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only steps and synchronisations move, and a log of both."""

    class Clock:
        now = 0.0
        log: list[str]

        def synchronize(self, device):
            assert device == CPU
            self.log.append("sync")
            self.now += 0.5

        def variant(self, name, step_s=1.0, images=4, **options):
            def steps():
                while True:
                    self.log.append(name)
                    self.now += step_s
                    yield images

            return Variant(name, steps, **options)

    made = Clock()
    made.log = []
    monkeypatch.setattr(windows, "perf_counter", lambda: made.now)
    monkeypatch.setattr(windows, "synchronize", made.synchronize)
    return made


def test_a_window_counts_whole_steps_until_the_time_is_up_and_then_waits_for_the_device(clock):
    measured = interleave([clock.variant("a", step_s=1.0)], device=CPU, seconds=2.5, repeats=1)
    assert measured == {"a": [Window(steps=3, images=12, seconds=3.5, host_seconds=3.0)]}


def test_every_other_round_goes_backwards(clock):
    variants = [clock.variant(name) for name in "abc"]
    interleave(variants, device=CPU, seconds=1, repeats=3, warmup=0, settle=lambda: clock.log.append("|"))
    windows = "".join(entry for entry in clock.log if entry != "sync").split("|")[1:]
    assert [steps[0] for steps in windows] == [*"abc", *"cba", *"abc"]


@pytest.mark.parametrize("error", [ValueError("decoder broke"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_every_iterator_is_closed_when_one_raises(clock, error):
    closed = []

    def endless(name):
        def steps():
            try:
                while True:
                    clock.now += 1
                    yield 1
            finally:
                closed.append(name)

        return Variant(name, steps)

    def failing():
        try:
            clock.now += 1
            yield 1
            raise error
        finally:
            closed.append("failing")

    with pytest.raises(type(error)) as raised:
        interleave([endless("a"), Variant("failing", failing), endless("c")], device=CPU, warmup=1, seconds=1)
    assert raised.value is error
    assert sorted(closed) == ["a", "c", "failing"]
    if isinstance(error, Exception):
        assert error.__notes__ == ["raised in step 1 of variant 'failing'"]


def test_a_variant_that_ends_is_an_error_with_its_name(clock):
    with pytest.raises(ArgumentError, match=r"steps of variant 'short' must be endless, got an end after 2\. Restart the data"):
        interleave([Variant("short", lambda: iter([1, 1]))], device=CPU, warmup=3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"repeats": 0}, "repeats must be at least 1, got 0."),
        ({"seconds": 0.0}, "seconds must be positive, got 0.0."),
        ({"seconds": float("nan")}, "seconds must be positive, got nan."),
    ],
)
def test_numbers_out_of_range_are_refused(clock, options, text):
    with pytest.raises(ValueError, match=text):
        interleave([clock.variant("a")], device=CPU, **options)


def test_two_variants_may_not_share_a_name(clock):
    with pytest.raises(ValueError, match=r"names of variants must be distinct, got \['a', 'a'\]"):
        interleave([clock.variant("a"), clock.variant("a")], device=CPU)


def test_summary_takes_medians_and_ratios_within_rounds():
    # The machine slows down from round to round by 10: only ratios within a round see that b is twice as fast as a.
    measured = {
        "a": [Window(100, 800, 1.0, 0.5), Window(100, 800, 10.0, 5.0), Window(100, 800, 100.0, 50.0)],
        "b": [Window(200, 1600, 1.0, 1.0), Window(300, 2400, 10.0, 3.0), Window(100, 800, 100.0, 10.0)],
    }
    a, b = summarise(measured, baseline="a")
    assert (a.name, a.steps_per_s, a.images_per_s, a.host_ms) == ("a", 10.0, 80.0, 50.0)
    assert (a.ratio, a.ratio_low, a.ratio_high) == (1.0, 1.0, 1.0)
    assert b.rounds == [200.0, 30.0, 1.0]
    assert (b.steps_per_s, b.images_per_s, b.host_ms) == (30.0, 240.0, 10.0)
    assert (b.ratio, b.ratio_low, b.ratio_high) == (2.0, 1.0, 3.0)


def test_summary_refuses_an_unknown_baseline():
    with pytest.raises(ValueError, match=r"baseline must be one of \['a'\], got 'b'. Pass None"):
        summarise({"a": [Window(1, 2, 1.0, 1.0)]}, baseline="b")


@pytest.mark.gpu
def test_synchronize_waits_for_the_gpu():
    device = torch.device("cuda")
    torch.cuda._sleep(10**8)
    event = torch.cuda.Event()
    event.record()
    synchronize(device)
    assert event.query()
