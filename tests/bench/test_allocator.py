import json

import pytest

from bench import allocator


def test_launches_with_and_without_the_setting_take_turns(monkeypatch):
    order = []

    def launch(keep, config):
        order.append(keep)
        return 300.0 if keep else 100.0 + len(order)

    monkeypatch.setattr(allocator, "launch", launch)
    found = allocator.main(allocator.Config(launches=3))
    assert order == [False, True, True, False, False, True]
    assert found["off"]["launches"] == [101.0, 104.0, 105.0]
    assert found["on"] == {"mean": 300.0, "std": 0.0, "launches": [300.0] * 3}
    assert found["ratio"] == pytest.approx(300 / (310 / 3))
    assert {"machine", "subject"} < found.keys()
    json.dumps(found, allow_nan=False)


def test_one_launch_has_no_spread():
    assert allocator.summary([5.0]) == {"mean": 5.0, "std": None, "launches": [5.0]}


def test_a_real_launch_measures_the_references_own_step():
    config = allocator.Config(launches=1, steps=1, warmup=0, batch_size=2)
    assert allocator.launch(True, config) > 0
