"""What the iterators of a loader share: how far the host may be ahead."""

from gpuaug.loader.state import RunAheadLimit


def test_run_ahead_limit_waits_for_the_newest_event_beyond_a_smaller_depth():
    class Counted:
        def __init__(self, number):
            self.number = number

        def query(self):
            return False

        def synchronize(self):
            waited.append(self.number)

    waited, run_ahead_limit = [], RunAheadLimit()
    for number in range(5):
        run_ahead_limit.add(Counted(number), ahead=4)
    run_ahead_limit.add(Counted(5), ahead=1)
    run_ahead_limit.add(Counted(6), ahead=1)
    assert waited == [0, 4, 5]
