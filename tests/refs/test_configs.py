from pathlib import Path

import pytest

from refs.vision_resnet import Config
from shared.settings import parse

CONFIGS = sorted((Path(__file__).parents[2] / "refs" / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_committed_config_is_one_that_the_script_takes(path):
    config = parse(Config, ["--config", str(path), "--data-dir", "data"], "x", "")
    assert config.data == "cifar10"
    assert str(path.name) in path.read_text(), "its own command is in it"
