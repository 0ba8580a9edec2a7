from support.bench.commands import TINY

from bench.suites.training import items


def test_items_has_both_datasets_and_both_endings(tmp_path):
    made = items.main([*TINY, "--model", "squeezenet1_1", "--json", str(tmp_path / "items.json")])
    assert {row["case"] for row in made["rows"]} == {
        f"{source}{ending}" for source in ("workers", "no workers, Python", "no workers, torch") for ending in ("", ", .item()")
    }
    assert all(row["name"] in ("serial", "streamed") for row in made["rows"])
