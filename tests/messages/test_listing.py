"""The approved listing of all messages, and the examples of what they advise."""

import pytest
from support.messages import listing, registry

registry.load()


def test_the_listing_has_every_message():
    approved = {path.stem: path.read_text() for path in listing.FOLDER.glob("*.txt")}
    listed = listing.listed()
    changed = sorted(room for room in approved.keys() | listed.keys() if approved.get(room) != listed.get(room))
    assert changed == [], f"messages of these are new or changed: {listing.COMMAND}"


def test_advice_that_is_code_has_an_example():
    missing = [text for text in listing.listed().values() if "MISSING" in text]
    assert missing == []


@pytest.mark.parametrize("name", registry.EXAMPLES)
def test_what_a_message_advises_works(name):
    registry.run(name)


def test_an_example_uses_what_the_advice_prints():
    left_out = {name: registry.code_left_out(name) for name in registry.EXAMPLES}
    assert {name: codes for name, codes in left_out.items() if codes} == {}


def test_a_part_is_found_in_a_message():
    parts = [part for function in registry.EXAMPLES.values() for part in function.parts] + list(registry.UNTRIED)
    assert parts
    assert [part for part in parts if not registry.having(part)] == []


def test_a_message_without_an_example_has_no_example():
    names, reasons = registry.covered()
    assert names.keys() & reasons.keys() == set()
    assert len(reasons) <= 30
