import re
from pathlib import Path

import pytest

from refs import sequence_lstm, vision_resnet
from shared.settings import parse

CONFIGS = sorted((Path(__file__).parents[2] / "refs" / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_committed_config_is_one_that_the_script_takes(path):
    (script,) = re.findall(
        rf"python refs/(\w+).py --config refs/configs/{path.name}", path.read_text()
    )
    cls = {"vision_resnet": vision_resnet.Config, "sequence_lstm": sequence_lstm.Config}[script]
    config = parse(cls, ["--config", str(path), "--data-dir", "data"], "x", "")
    assert config.data in path.read_text()
