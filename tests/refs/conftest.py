"""What the tests of all references need."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """The sums of a run depend on the number of threads: here it is always one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
