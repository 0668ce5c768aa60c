import itertools
import json
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shared.checkpoints import Checkpoints, load
from shared.errors import UserError
from shared.state_dicts import (
    clean_keys,
    load_weights,
    migrate,
    read_weights,
    save_weights,
    unwrap,
)


class Network(nn.Module):
    """Small, with buffers, and with a child whose name is the wrappers' own prefix."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.module = nn.Linear(3, 4)
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 2)
            nn.init.uniform_(self.norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.module(x)))


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # only the wrapper matters; inductor loads slowly


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": compiled,
    "ddp": nn.parallel.DistributedDataParallel,
    "both": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
}
MORE_WRAPPERS = {
    "compiled in place": compiled_in_place,
    "ddp of compiled": lambda model: nn.parallel.DistributedDataParallel(compiled(model)),
    "dp": nn.DataParallel,
    "three": lambda model: nn.DataParallel(compiled(nn.DataParallel(model))),
}


def equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left
    )


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


# Wrappers


@pytest.mark.parametrize("wrap", [*WRAPPERS, *MORE_WRAPPERS])
def test_unwrap_finds_the_network(process_group, wrap):
    model = Network()
    assert unwrap((WRAPPERS | MORE_WRAPPERS)[wrap](model)) is model


def test_unwrap_takes_a_child_called_module_for_what_it_is():
    model = nn.Module()
    model.module = Network()
    assert unwrap(model) is model


def test_unwrap_does_not_import_the_compiler(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", None)  # importing it now raises
    model = Network()
    assert unwrap(nn.DataParallel(model)) is model


@pytest.mark.parametrize(("save", "restore"), [*itertools.product(WRAPPERS, WRAPPERS)])
def test_weights_saved_under_one_wrapper_load_under_another(process_group, tmp_path, save, restore):
    source = Network(seed=1)
    wrapped = WRAPPERS[save](source)
    expected = {key: value.clone() for key, value in source.state_dict().items()}
    elsewhere = wrapped.state_dict()  # with the wrappers' prefixes, as other programs save it
    ours = load(Checkpoints(tmp_path).save(1, unwrap(wrapped).state_dict()))
    assert ours.keys() == expected.keys()
    save_weights(tmp_path / "model.safetensors", wrapped, {})
    exported, _ = read_weights(tmp_path / "model.safetensors")
    assert exported.keys() == expected.keys()
    for weights in (elsewhere, ours, exported):
        target = Network(seed=2)
        assert not equal(target.state_dict(), expected)
        load_weights(WRAPPERS[restore](target), weights, "there")
        assert equal(target.state_dict(), expected)


@pytest.mark.parametrize("wrap", MORE_WRAPPERS)
def test_other_nestings_load_too(process_group, wrap):
    source, target, back = Network(seed=1), Network(seed=2), Network(seed=3)
    load_weights(target, MORE_WRAPPERS[wrap](source).state_dict(), "there")
    load_weights(MORE_WRAPPERS[wrap](back), target.state_dict(), "there")
    assert equal(target.state_dict(), source.state_dict())
    assert equal(back.state_dict(), source.state_dict())


def compiled_parts(seed: int) -> nn.Module:
    model = Network(seed)
    model.head = compiled(checkpoint_wrapper(model.head))
    model.module = compiled(model.module)
    return model


def test_compiled_parts_of_a_network_load_from_and_into_the_plain_one(process_group, tmp_path):
    source, plain, target = compiled_parts(seed=1), Network(seed=2), compiled_parts(seed=3)
    assert "module._orig_mod.weight" in source.state_dict()
    load_weights(plain, nn.parallel.DistributedDataParallel(source).state_dict(), "there")
    assert torch.equal(plain.module.weight, source.module.weight)
    assert torch.equal(plain.head.bias, unwrap(source.head).bias)
    load_weights(target, plain.state_dict(), "there")
    assert equal(target.state_dict(), source.state_dict())
    save_weights(tmp_path / "w.safetensors", source, {})
    assert equal(read_weights(tmp_path / "w.safetensors")[0], plain.state_dict())


@pytest.mark.parametrize(
    ("saved", "expected", "cleaned"),
    [
        (["module.a", "module.b"], ["a", "b"], ["a", "b"]),
        (["_orig_mod.module.a"], ["a"], ["a"]),
        (["module._orig_mod.a"], ["a"], ["a"]),
        (["module.module._orig_mod._orig_mod.a"], ["a"], ["a"]),
        (["x._orig_mod.a", "x._checkpoint_wrapped_module.b"], ["x.a", "x.b"], ["x.a", "x.b"]),
        # A child called module, alone, beside others, and beside its own namesakes.
        (["module.a"], ["module.a"], ["module.a"]),
        (["module.module.a"], ["module.a"], ["module.a"]),
        (["module.a", "module.module.a"], ["a", "module.a"], ["a", "module.a"]),
        (["x.module.a", "module.a"], ["x.module.a", "module.a"], ["x.module.a", "module.a"]),
        # No wrapper is in front of *all* keys, so these belong to another network.
        (["module.a", "b"], ["a", "b"], ["module.a", "b"]),
        # Some are missing and some are too many, but the wrapper is still plain to see.
        (["module.a", "module.c"], ["a", "b"], ["a", "c"]),
        (["module.c"], ["a"], ["module.c"]),
        # Names that only look like a wrapper's.
        (["my_orig_mod.a", "modules.a"], ["mya", "a"], ["my_orig_mod.a", "modules.a"]),
        # Two keys must not become one.
        (
            ["a", "_orig_mod.a", "_orig_mod.b"],
            ["a", "b"],
            ["a", "_orig_mod.a", "_orig_mod.b"],
        ),
        ([], ["a"], []),
    ],
)
def test_clean_keys(saved, expected, cleaned):
    state_dict = {key: number for number, key in enumerate(saved)}
    assert clean_keys(state_dict, expected) == {key: n for n, key in enumerate(cleaned)}
    assert list(state_dict) == saved


component = st.sampled_from(["module", "a", "b"])
keys = st.lists(component, min_size=1, max_size=3).map(".".join)


@settings(max_examples=200, deadline=None)
@given(
    expected=st.sets(keys, min_size=1, max_size=5),
    wrappers=st.lists(st.sampled_from(["module.", "_orig_mod."]), max_size=4),
)
def test_any_nesting_of_wrappers_is_undone_for_any_names(expected, wrappers):
    saved = {"".join(wrappers) + key: key for key in expected}
    assert clean_keys(saved, expected) == {key: key for key in expected}


# Strict loading


def test_all_that_does_not_fit_is_listed_and_nothing_is_changed():
    model = Network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    weights = Network(seed=1).state_dict()
    weights["head.weight"] = torch.zeros(5, 4)
    weights["norm.num_batches_tracked"] = torch.zeros(1)
    weights["norm.weight"] = "text"
    weights["extra"] = weights.pop("head.bias")
    with pytest.raises(UserError) as caught:
        load_weights(model, weights, "runs/x.pt")
    assert one_line(caught.value) == (
        "runs/x.pt does not fit the model: missing head.bias; unexpected extra; misshapen "
        "norm.weight (str instead of 4), norm.num_batches_tracked (1 instead of scalar), "
        "head.weight (5×4 instead of 2×4)"
    )
    assert equal(model.state_dict(), before)


def test_long_lists_are_shortened_with_a_count():
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(20)])
    with pytest.raises(UserError) as caught:
        load_weights(model, {f"other.{i}": torch.ones(1) for i in range(5)}, "x")
    assert one_line(caught.value) == (
        "x does not fit the model: missing 0.weight, 0.bias, 1.weight, 1.bias and 36 more; "
        "unexpected other.0, other.1, other.2, other.3 and 1 more"
    )


# Migrations


def test_a_layer_that_moved_within_a_sequential_gives_bitwise_the_same_outputs():
    old = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    new = nn.Sequential(
        nn.Identity(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    migrations = [{"0": "1", "2": "3", "4": "5"}]
    load_weights(new, migrate(old.state_dict(), 0, migrations, "x"), "x")
    x = torch.randn(5, 3)
    assert torch.equal(new(x), old(x))


def test_two_layers_can_change_places():
    old = {"a.weight": 1, "b.weight": 2, "c": 3}
    assert migrate(old, 0, [{"a": "b", "b": "a"}], "x") == {"b.weight": 1, "a.weight": 2, "c": 3}
    assert old == {"a.weight": 1, "b.weight": 2, "c": 3}


def test_prefixes_are_whole_components_and_the_longest_wins():
    old = {"head.1.w": 1, "head.10.w": 2, "head.1.inner.w": 3, "neck.head.1.w": 4, "head.1": 5}
    migration = {"head.1": "top", "head.1.inner": "deep"}
    assert migrate(old, 0, [migration], "x") == {
        "top.w": 1,
        "head.10.w": 2,
        "deep.w": 3,
        "neck.head.1.w": 4,
        "top": 5,
    }


def test_only_the_migrations_that_are_still_ahead_are_applied():
    migrations = [{"a": "b"}, {"b": "c"}, {"c": "a"}]
    results = [migrate({"b": 0}, version, migrations, "x") for version in range(4)]
    assert results == [{"a": 0}, {"a": 0}, {"b": 0}, {"b": 0}]


@pytest.mark.parametrize("version", [3, -1])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(UserError) as caught:
        migrate({}, version, [{}, {}], "runs/x.pt")
    assert one_line(caught.value) == (
        f"runs/x.pt has weights of version {version}, but this program knows versions 0 to 2"
    )


def test_a_migration_that_would_lose_an_entry_is_an_error():
    with pytest.raises(ValueError, match="migration 1 gives two entries of x the same key"):
        migrate({"a": 0, "b": 1}, 0, [{"a": "b"}], "x")


# safetensors


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(3, 2)
            self.head = nn.Linear(2, 3, bias=False)
            self.head.weight = self.embedding.weight
            self.convolution = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
            self.register_buffer("view", torch.arange(6.0).reshape(2, 3).T)
            self.register_buffer("bfloat16_buffer", torch.ones(2, dtype=torch.bfloat16))
            self.register_buffer("empty", torch.ones(0, 4))
            self.register_buffer("flag", torch.tensor(True))


def test_safetensors_hold_tied_strided_and_odd_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    model, other = Tied(seed=0), Tied(seed=1)
    save_weights(path, model, {"version": "2", "names": "zero\nöne"})
    weights, metadata = read_weights(path)
    assert metadata == {"version": "2", "names": "zero\nöne"}
    assert equal(weights, model.state_dict())
    assert all(tensor.is_contiguous() for tensor in weights.values())
    load_weights(other, weights, path)
    assert equal(other.state_dict(), model.state_dict())
    assert other.head.weight is other.embedding.weight
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_same_weights_give_the_same_bytes(tmp_path):
    files = set()
    for turn in range(8):
        about = {str(number): number for number in range(9)}
        about = about if turn % 2 else dict(reversed(about.items()))
        save_weights(tmp_path / "w.safetensors", nn.BatchNorm1d(3), about)
        files.add((tmp_path / "w.safetensors").read_bytes())
    assert len(files) == 1


def test_files_of_other_programs_are_read(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.arange(3)}, tmp_path / "a.safetensors")
    weights, metadata = read_weights(tmp_path / "a.safetensors")
    assert equal(weights, {"a": torch.arange(3)})
    assert metadata == {}


def test_damage_to_a_safetensors_file_never_changes_a_weight_unseen(tmp_path):
    path = tmp_path / "model.safetensors"
    model = nn.Linear(2, 2)
    save_weights(path, model, {"key": "value"})
    whole = path.read_bytes()
    names = [
        range(at, at + len(name)) for name in (b"about", b"sha256") if (at := whole.index(name))
    ]
    for position in range(len(whole)):
        path.write_bytes(whole[:position])
        with pytest.raises(UserError) as caught:
            read_weights(path)
        assert f"{path} is damaged" in one_line(caught.value)
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        if not any(position in name for name in names):  # then it is a file without a checksum
            with pytest.raises(UserError) as caught:
                read_weights(path)
            assert f"{path} is damaged" in one_line(caught.value)


def test_another_dtype_of_the_same_size_is_damage(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(path, nn.Linear(2, 2), {})
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(UserError, match="is damaged: its content does not match its checksum"):
        read_weights(path)


def test_what_is_wrong_with_a_file_is_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no safetensors here, but a few words of text")
    torch.save({"a": torch.ones(1)}, tmp_path / "pickle")
    expected = {
        "missing": "cannot read {}: No such file or directory",
        "folder": "cannot read {}: Is a directory",
        "text": "{} is damaged, or not a safetensors file: ",
        "pickle": "{} is damaged, or not a safetensors file: ",
    }
    for name, message in expected.items():
        with pytest.raises(UserError) as caught:
            read_weights(tmp_path / name)
        assert one_line(caught.value).startswith(message.format(tmp_path / name))


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    path = tmp_path / "gone" / "model.safetensors"
    with pytest.raises(UserError) as caught:
        save_weights(path, nn.Linear(1, 1), {})
    assert one_line(caught.value) == f"cannot write {path}: No such file or directory"


def test_the_name_of_the_checksum_cannot_be_taken(tmp_path):
    with pytest.raises(ValueError, match="'sha256' is set by save_weights itself"):
        save_weights(tmp_path / "w.safetensors", nn.Linear(1, 1), {"sha256": ""})


class WithExtraState(nn.Module):
    def get_extra_state(self):
        return json.dumps({})


def test_a_model_with_more_than_tensors_is_refused(tmp_path):
    with pytest.raises(TypeError, match="_extra_state is a str"):
        save_weights(tmp_path / "w.safetensors", WithExtraState(), {})
    assert [*tmp_path.iterdir()] == []
