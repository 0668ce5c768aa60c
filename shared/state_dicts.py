"""State dicts: keys without traces of wrappers, strict loading, migration, safetensors files."""

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import UserError
from shared.files import atomic_write

_SHOWN = 4
"""Names of a list that an error message spells out before it counts the rest."""

_ABOUT, _CHECKSUM = "about", "sha256"

# No network has children of these names but through torch.compile and checkpoint_wrapper.
_WRAPPER_COMPONENT = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_checkpoint_wrapped_module)\.")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside DistributedDataParallel, DataParallel and torch.compile.

    The wrappers may be nested in any order. They are known by their type, so a network
    with a child called `module` is itself.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return unwrap(model.module)
    # Importing torch._dynamo takes seconds; where nobody has imported it, nothing is compiled.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and isinstance(model, eval_frame.OptimizedModule):
        return unwrap(model._orig_mod)
    return model


def clean_keys(state_dict: Mapping[str, Any], expected: Collection[str]) -> dict[str, Any]:
    """Rename the keys that a wrapped model has saved so that they match those of the bare model.

    `torch.compile` puts `_orig_mod.` into the names, `checkpoint_wrapper` puts
    `_checkpoint_wrapped_module.`, each also in front of inner parts, and DistributedDataParallel
    and DataParallel put `module.` in front of all. Of the ways to remove these, the one that
    matches most of the expected keys is taken, and among equals the one that removes least: a
    network with a child called `module` keeps its keys.

    Args:
        state_dict: what was saved; it is left as it is.
        expected: the keys of the model that is to be loaded. Where parts of that are compiled,
            their keys may hold `_orig_mod.` too.
    """
    wanted = set(expected)
    spelled = {_WRAPPER_COMPONENT.sub("", key): key for key in expected}
    readings = [list(state_dict)]
    for bare in _without_wrappers(list(state_dict)):
        readings.append([spelled.get(key, key) for key in bare])
    unambiguous = [keys for keys in readings if len(set(keys)) == len(keys)]
    best = max(unambiguous, key=lambda keys: len(wanted.intersection(keys)))
    return dict(zip(best, state_dict.values(), strict=True))


def _without_wrappers(keys: list[str]) -> Iterator[list[str]]:
    """Yield the keys without the compiler's components, then with one, two, ... `module.` less."""
    keys = [_WRAPPER_COMPONENT.sub("", key) for key in keys]
    yield keys
    while keys and all(key.startswith("module.") for key in keys):
        keys = [key.removeprefix("module.") for key in keys]
        yield keys


def load_weights(model: nn.Module, state_dict: Mapping[str, Any], source: str | Path) -> None:
    """Load weights strictly, into the network inside any wrappers and from any wrapper's keys.

    Args:
        model: changed only when everything fits.
        state_dict: weights of the same network, saved plain, compiled or under DDP.
        source: the file that the weights came from, for the error message.

    Raises:
        UserError: names every missing, unexpected and misshapen key (long lists are shortened).
    """
    bare = unwrap(model)
    own = bare.state_dict()
    given = clean_keys(state_dict, own)
    problems = {
        "missing": [key for key in own if key not in given],
        "unexpected": [key for key in given if key not in own],
        "misshapen": [
            f"{key} ({_shape(given[key])} instead of {_shape(own[key])})"
            for key in own
            if key in given and _shape(given[key]) != _shape(own[key])
        ],
    }
    if any(problems.values()):
        told = "; ".join(f"{kind} {_shortened(keys)}" for kind, keys in problems.items() if keys)
        raise UserError(f"{source} does not fit the model: {told}")
    bare.load_state_dict(given, strict=True)


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "×".join(map(str, value.shape)) or "scalar"


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    rest = len(names) - _SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def migrate(
    state_dict: Mapping[str, Any],
    version: int,
    migrations: Sequence[Mapping[str, str]],
    source: str | Path,
) -> dict[str, Any]:
    """Bring the keys of a state dict from an older version of a model to those of today.

    A migration maps old prefixes to new ones. A prefix is of whole components (`head.1` is none of
    `head.10.weight`), the longest that fits is taken, and all are renamed at once, so that two
    layers can change places: `{"layers.0": "layers.1", "layers.1": "layers.0"}`.

    Args:
        state_dict: clean keys; left as it is.
        version: how many of the migrations the state dict has behind it already.
        migrations: all there have ever been, the oldest first.
        source: the file that the weights came from, for the error message.

    Raises:
        UserError: the version is one that this program does not know.
        ValueError: a migration gives two entries the same key.
    """
    if not 0 <= version <= len(migrations):
        raise UserError(
            f"{source} has weights of version {version}, "
            f"but this program knows versions 0 to {len(migrations)}"
        )
    migrated = dict(state_dict)
    for number, migration in enumerate(migrations[version:], start=version + 1):
        renamed = {_renamed(key, migration): value for key, value in migrated.items()}
        if len(renamed) < len(migrated):
            raise ValueError(f"migration {number} gives two entries of {source} the same key")
        migrated = renamed
    return migrated


def _renamed(key: str, migration: Mapping[str, str]) -> str:
    fitting = [old for old in migration if key == old or key.startswith(f"{old}.")]
    if not fitting:
        return key
    longest = max(fitting, key=len)
    return migration[longest] + key[len(longest) :]


def save_weights(path: Path, model: nn.Module, about: Mapping[str, Any]) -> None:
    """Write the weights of the network inside any wrappers as a safetensors file, atomically.

    Tensors that share memory are written under each of their names, and a model that ties them has
    them tied after loading too, since both are then copied into the same memory. The same weights
    give the same bytes.

    Args:
        path: of the file.
        model: whose weights are written.
        about: what has to be known to use them, as JSON can hold it; it becomes the metadata.

    Raises:
        UserError: the file cannot be written.
        TypeError: the state dict holds something other than tensors.
    """
    import safetensors.torch

    tensors = {}
    for key, value in unwrap(model).state_dict().items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{key} is a {type(value).__name__}: safetensors holds only tensors")
        name = _WRAPPER_COMPONENT.sub("", key)
        # A copy, because the format refuses tensors that share memory or are not contiguous.
        tensors[name] = value.to("cpu", copy=True, memory_format=torch.contiguous_format)
    if _CHECKSUM in about:
        raise ValueError(f"the key {_CHECKSUM!r} is set by save_weights itself")
    # The format has no checksum, and no order among several entries of metadata: so there is one
    # entry, which holds the checksum too.
    sealed = json.dumps({**about, _CHECKSUM: _checksum(tensors, about)}, sort_keys=True)
    try:
        with atomic_write(path) as file:
            file.write(safetensors.torch.save(tensors, {_ABOUT: sealed}))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a safetensors file: the tensors by name, on the CPU, and what was said about them.

    Raises:
        UserError: the file is not there, not safetensors, or damaged. Files of other programs have
            no checksum, and in those a changed weight goes unseen; nothing is said about them.
    """
    from safetensors import SafetensorError, safe_open

    try:
        path.open("rb").close()  # says better than safe_open what is wrong with a missing file
        with safe_open(path, framework="pt", device="cpu") as file:
            about = json.loads((file.metadata() or {}).get(_ABOUT, "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged, or not a safetensors file: {error}") from error
    if not isinstance(about, dict):
        raise UserError(f"{path}: its metadata {_ABOUT} is not an object")
    checksum = about.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(tensors, about):
        raise UserError(f"{path} is damaged: its content does not match its checksum")
    return tensors, about


def _checksum(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Return the SHA-256 of contiguous CPU tensors, their names, dtypes and shapes, and `about`."""
    described = [[key, str(tensors[key].dtype), [*tensors[key].shape]] for key in sorted(tensors)]
    digest = hashlib.sha256(json.dumps([described, about], sort_keys=True).encode())
    for key in sorted(tensors):
        digest.update(tensors[key].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
