"""Randomness that does not depend on how the work is laid out.

Every random choice of a run is a function of what it is *for*: the order of an epoch of
(seed, epoch), the augmentation of a sample of (seed, epoch, index), the dropout of a micro-step
of (seed, step, micro-step, rank). So the number of workers does not matter, and neither does
where a run was interrupted: no state of a generator has to be saved.
"""

import os
import random

import numpy as np
import torch

ORDER, AUGMENTATION, SAMPLE, STEP, SETUP, SPLIT, BUCKETS = range(7)
"""Streams: the first part of a key, so that equal numbers in two uses give unrelated draws."""


def hash_key(*key: int) -> int:
    """Mix non-negative integers into one of 64 bits.

    Keys of one stream have the same length: zeros at the end of a short key do not count.
    NumPy documents the algorithm of `SeedSequence` as stable across versions:
    https://numpy.org/doc/stable/reference/random/bit_generators/generated/numpy.random.SeedSequence.html
    """
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def generator(*key: int) -> torch.Generator:
    """A generator on the CPU whose stream is a function of `key` alone.

    PyTorch's generator on the CPU (mt19937) takes 32 bits of its seed, so that of 65,000 keys
    about one pair shares a stream.
    """
    return torch.Generator().manual_seed(hash_key(*key))


def seed_everything(*key: int) -> None:
    """Set the global generators of Python, NumPy and PyTorch (all devices) from `key`."""
    seed = hash_key(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the legacy generator, which transforms found elsewhere use
    torch.manual_seed(seed)


def seed_step(seed: int, step: int, micro_step: int = 0, rank: int = 0) -> None:
    """Set PyTorch's generators for one micro-step: dropout then needs nothing saved to resume."""
    torch.manual_seed(hash_key(STEP, seed, step, micro_step, rank))


def set_deterministic(enabled: bool) -> None:
    """Make operators bitwise repeatable on one machine, at some cost in speed on a GPU.

    Call it before the first CUDA operation: cuBLAS reads its workspace setting only once.
    An operator that has no deterministic form raises RuntimeError when it is called.
    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if enabled != torch.are_deterministic_algorithms_enabled():  # the call imports the compiler
        torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cudnn.benchmark = False  # picks algorithms by timing, which is never repeatable
