"""The journal: what is on the disk is what happened."""

import json
import math

import pytest

from bench.measuring.journal import Journal
from shared.errors import UserError


def test_events_come_back_in_order(tmp_path):
    journal = Journal(tmp_path / "new/journal.jsonl")
    for number in range(3):
        journal.write("block", case="a" if number else "b", block=number)
    journal.close()
    again = Journal(journal.path)
    assert again.events == journal.events
    assert [event["block"] for event in again.find("block", case="a")] == [1, 2]
    assert list(again.find("launch")) == []


def test_an_event_is_on_the_disk_when_it_is_written(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("block", step_s=0.1)
    assert json.loads(journal.path.read_text()) == {"event": "block", "step_s": 0.1}


@pytest.mark.parametrize("torn", [b'{"event": "bl', b'{"event": "block"}', b"\xff"])
def test_a_torn_last_line_is_dropped_and_written_over(tmp_path, torn):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "suite"}\n' + torn)
    journal = Journal(path)
    journal.write("block")
    journal.close()
    assert path.read_text() == '{"event": "suite"}\n{"event": "block"}\n'


def test_a_file_that_is_no_journal_is_named(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event": "suite"}\nhello\n')
    with pytest.raises(UserError, match=r"journal\.jsonl: line 2 is not a line of a journal"):
        Journal(path)


def test_what_json_has_not_is_not_written(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        journal.write("block", step_s=math.nan)
    assert journal.path.read_text() == ""
    assert journal.events == []
