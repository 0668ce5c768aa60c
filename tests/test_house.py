"""The rules of the house that no linter knows. Each check is seen to find a planted violation."""

import ast
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[1]

LEVELS = ("shared", "refs", "bench")
"""Each may import itself and what stands before it, except that no reference imports another."""

PRE_COMMIT = ".pre-commit-config.yaml"

NEEDED_WITHOUT_IMPORT = {
    "pytest-benchmark": "a plugin of pytest, which `pytest bench` loads",
    "tensorboard": "torch.utils.tensorboard imports it",
}
"""Dependencies that no module imports by name, and why they are needed all the same."""


# Python sources


def sources(root: Path) -> Iterator[tuple[PurePath, ast.Module]]:
    """Each module of the three packages: its path below `root`, and its syntax tree."""
    for level in LEVELS:
        for path in sorted((root / level).rglob("*.py")):
            yield path.relative_to(root), ast.parse(path.read_text("utf-8"))


def imports(path: PurePath, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported, inside functions too.

    `from a import b` counts as `a.b`, since `b` may be a module.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=module, names=names, level=level):
                above = path.parts[: len(path.parts) - level] if level else ()
                for alias in names:
                    yield node.lineno, ".".join([*above, *filter(None, [module]), alias.name])
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def wrong_imports(root: Path) -> list[str]:
    """Imports against the direction shared <- refs <- bench, and of one reference by another."""
    # `python refs/a.py` puts refs/ on the path, so there a plain `import b` finds its neighbour
    references = {path.stem for path in (root / "refs").glob("*.py")} - {"__init__"}
    wrong = []
    for path, tree in sources(root):
        level = path.parts[0]
        forbidden = set(LEVELS[LEVELS.index(level) + 1 :])
        if level == "refs":
            forbidden |= {"refs", *references}
        wrong += [
            f"{path}:{line} imports {name}"
            for line, name in imports(path, tree)
            if name.split(".")[0] in forbidden
        ]
    return wrong


def cuda_calls(root: Path) -> list[str]:
    """Calls of `.cuda()`, which bind a script to one kind of accelerator."""
    return [
        f"{path}:{node.lineno}"
        for path, tree in sources(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "cuda"
    ]


# Siblings

SIBLINGS = {
    "vision_resnet_distributed.py": {"vision_resnet_distributed": "vision_resnet"},
    "sequence_lstm.py": {
        "SequenceBatch": "ImageBatch",
        "SequenceSet": "ImageSet",
        "sequences": "images",
        "micro.inputs, micro.lengths": "micro.inputs",
        "inputs.inputs, inputs.lengths": "inputs.inputs",
    },
}
"""References that follow vision_resnet.py, and the words that stand for its words in each."""

DIFFERENT = {
    "vision_resnet_distributed.py": {
        "Config": "more settings",
        "train_step": "shares of a batch, gradients that stay, a scaled loss",
        "train_one_epoch": "a wrapped model; a step that was skipped",
        "evaluate": "a precision of its own",
        "train": "wraps the model",
    },
    "sequence_lstm.py": {
        "Config": "other settings",
        "make_loader": "lengths make buckets",
        "train_one_epoch": "other augmentation",
        "describe": "another network, and features",
        "make_preparation": "features",
        "build_model": "another network",
        "train": "tells how LSTMs run",
        "evaluate_file": "weights bring their features",
        "main": "weights bring their features; other things make learning by heart harder",
    },
}
"""Functions and classes of one name that are not equal, and why."""


def definitions(source: str, words: dict[str, str]) -> dict[str, str]:
    """The text of each function and class of a module, with some words replaced by others."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = ast.unparse(node)
            for word, other in words.items():
                text = text.replace(word, other)
            found[node.name] = text
    return found


def unlike(one: str, other: str, words: dict[str, str]) -> set[str]:
    """Names of what two modules both define, and not alike."""
    ours, theirs = definitions(one, {}), definitions(other, words)
    return {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


# Packaging


def pyproject(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))


def packaging_mismatches(root: Path) -> list[str]:
    """Packages and package data that exist but are not declared, or the other way round."""
    setuptools = pyproject(root)["tool"]["setuptools"]
    declared = set(setuptools["packages"])
    found = {".".join(path.parent.parts) for path, _ in sources(root)}
    wrong = [f"package {name} is not declared" for name in sorted(found - declared)]
    wrong += [f"package {name} does not exist" for name in sorted(declared - found)]

    data = {
        path.relative_to(root)
        for level in LEVELS
        for path in (root / level).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    for package, patterns in setuptools["package-data"].items():
        folder = package.replace(".", "/")
        for pattern in patterns:
            matched = {path for path in data if path.match(f"{folder}/{pattern}")}
            data -= matched
            if not matched:
                wrong.append(f"package data {package}: {pattern} matches nothing")
    return wrong + [f"{path} is not declared as package data" for path in sorted(data)]


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def distribution_name(requirement: str) -> str:
    return canonical(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def dependency_mismatches(
    root: Path, distributions: dict[str, list[str]], needed_without_import: dict[str, str]
) -> list[str]:
    """Third-party imports that are not declared, declarations and exceptions not needed.

    Args:
        root: The folder of pyproject.toml.
        distributions: Top-level import names, and the distributions that provide each.
        needed_without_import: Distributions that need no import, and the reasons.
    """
    declared = {distribution_name(line) for line in pyproject(root)["project"]["dependencies"]}
    ours = {*LEVELS, *sys.stdlib_module_names}
    used: set[str] = set()
    wrong = []
    for path, tree in sources(root):
        for line, name in imports(path, tree):
            top = name.split(".")[0]
            providers = {canonical(provider) for provider in distributions.get(top, [])}
            used |= providers
            if top not in ours and not providers & declared:
                wrong.append(f"{path}:{line} imports {top}, which no declared dependency provides")
    wrong += [
        f"{name} is declared and not imported"
        for name in sorted(declared - used - needed_without_import.keys())
    ]
    wrong += [
        f"the exception for {name} is not needed"
        for name in sorted(needed_without_import)
        if name in used or name not in declared
    ]
    return wrong


# Commands


def readme_commands(readme: str) -> list[str]:
    """The command lines of the first ```sh block, without their comments."""
    block = re.search(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, "README.md has no ```sh block"
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in block[1].splitlines())
    return [line for line in lines if line]


def ci_commands(script: str) -> list[str]:
    """What `.ci/run` runs as `part 'COMMAND'`."""
    lines = (line for line in script.splitlines() if line.startswith("part "))
    return [shlex.split(line)[1] for line in lines]


def workflow_commands(workflow: str) -> list[str]:
    return [match.strip() for match in re.findall(r"^\s*(?:- )?run:(.*)", workflow, re.MULTILINE)]


def nox_sessions(noxfile: str) -> set[str]:
    """Names of the functions that `@nox.session` decorates."""
    return {
        node.name
        for node in ast.parse(noxfile).body
        if isinstance(node, ast.FunctionDef)
        and "nox.session" in {ast.unparse(decorator) for decorator in node.decorator_list}
    }


def sessions_named(text: str) -> set[str]:
    """The a and b of every `nox … -s a b`, up to an option, a quote or the end of the command."""
    named: set[str] = set()
    for arguments in re.findall(r"\bnox\b[^\n`'#&|;]*? -s ([^\n`'#&|;]+)", text):
        words = arguments.split()
        options = [index for index, word in enumerate(words) if word.startswith("-")]
        named.update(words[: min(options, default=len(words))])
    return named


def documents(root: Path) -> list[Path]:
    """Where people are told which sessions there are."""
    named = ["README.md", "CONTRIBUTING.md", "pyproject.toml", PRE_COMMIT, ".ci/run"]
    return [*(root / name for name in named), *sorted((root / "docs").rglob("*.md"))]


def ruff_versions(root: Path) -> set[str]:
    """Every requirement on ruff, in pyproject.toml and in the pre-commit hooks."""
    texts = [(root / name).read_text("utf-8") for name in ("pyproject.toml", PRE_COMMIT)]
    return {match for text in texts for match in re.findall(r'"(ruff\b[^"]*)"', text)}


# The rules, here


def test_imports_go_one_way():
    assert wrong_imports(ROOT) == []


def test_nothing_calls_cuda():
    assert cuda_calls(ROOT) == []


@pytest.mark.parametrize("name", SIBLINGS)
def test_what_references_have_in_common_is_the_same(name):
    """What is not may be added to DIFFERENT if it must be so; what no longer is comes out of it."""
    first, other = ((ROOT / "refs" / file).read_text() for file in ("vision_resnet.py", name))
    assert unlike(first, other, SIBLINGS[name]) == DIFFERENT[name].keys()


def test_every_reference_is_compared():
    scripts = {path.name for path in (ROOT / "refs").glob("*.py")} - {"__init__.py"}
    assert scripts == {"vision_resnet.py", *SIBLINGS}


def test_packages_and_their_data_are_declared():
    assert packaging_mismatches(ROOT) == []


def test_dependencies_are_those_that_are_imported():
    found = dependency_mismatches(ROOT, dict(packages_distributions()), NEEDED_WITHOUT_IMPORT)
    assert found == []


def test_ci_runs_the_commands_of_the_readme():
    commands = readme_commands((ROOT / "README.md").read_text("utf-8"))
    assert len(commands) == 2
    assert set(commands) <= set(ci_commands((ROOT / ".ci/run").read_text("utf-8")))


def test_ci_runs_every_kind_of_check():
    run = "\n".join(ci_commands((ROOT / ".ci/run").read_text("utf-8")))
    assert sessions_named(run) == {"lint", "types", "tests", "tests_lowest"}


def test_the_workflow_runs_the_ci_script_and_nothing_else():
    assert (ROOT / ".ci/run").stat().st_mode & stat.S_IXUSR
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    assert workflow_commands(workflow) == [".ci/run"]


def test_the_sessions_that_are_spoken_of_exist():
    sessions = nox_sessions((ROOT / "noxfile.py").read_text("utf-8"))
    unknown = {
        path.name: missing
        for path in documents(ROOT)
        if (missing := sessions_named(path.read_text("utf-8")) - sessions)
    }
    assert sessions == {"lint", "types", "tests", "tests_lowest", "stress", "bench"}
    assert unknown == {}


def test_pre_commit_and_lint_use_the_same_ruff():
    assert len(ruff_versions(ROOT)) == 1


# The checks, on planted violations


def plant(root: Path, files: dict[str, str]) -> Path:
    """A small house below `root`; every folder of a file becomes a package."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("shared/a.py", "import refs"),
        ("shared/a.py", "import numpy, bench.cli"),
        ("shared/a.py", "from refs.vision import train_step"),
        ("shared/data/a.py", "from ... import refs"),
        ("shared/a.py", "def f():\n    import bench"),
        ("shared/a.py", "import importlib\nimportlib.import_module('refs.vision')"),
        ("refs/a.py", "import bench"),
        ("refs/a.py", "from refs import b"),
        ("refs/a.py", "from . import b"),
        ("refs/a.py", "import b"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, path, line):
    plant(tmp_path, {"refs/a.py": "", "refs/b.py": "", path: line})
    (found,) = wrong_imports(tmp_path)
    assert found.startswith(path)


def test_right_imports_are_left_alone(tmp_path):
    plant(
        tmp_path,
        {
            "shared/a.py": "import os, torch\nfrom shared import b\nfrom .data import c",
            "shared/data/c.py": "from .. import b\nfrom ..b import refs",
            "refs/a.py": "from shared.data import c\n'import bench'  # import bench",
            "bench/a.py": "from refs.a import train_step\nimport shared.b\nfrom . import refs",
        },
    )
    assert wrong_imports(tmp_path) == []


def test_a_call_of_cuda_is_found_and_a_comment_is_not(tmp_path):
    plant(
        tmp_path,
        {
            "shared/a.py": "# x.cuda()\ntorch.cuda.is_available()\n'''model.cuda()'''",
            "refs/a.py": "model = model.cuda()",
            "bench/a.py": "def f(x):\n    return x.to('cpu').cuda(0)",
        },
    )
    assert cuda_calls(tmp_path) == ["refs/a.py:1", "bench/a.py:2"]


def test_a_function_that_has_drifted_apart_is_found():
    ours = "def f(batch: ImageBatch): return batch\ndef g(): return 1\ndef only(): ..."
    theirs = "def f(batch: SequenceBatch): return batch  # a comment\ndef g(): return 2"
    assert unlike(ours, theirs, {"SequenceBatch": "ImageBatch"}) == {"g"}
    assert unlike(ours, theirs, {}) == {"f", "g"}


PYPROJECT = """
[project]
dependencies = ["torch>=2.9", "nvidia-ml-py>=12.560", "Tomli_W"]
[tool.setuptools]
packages = ["shared", "shared.data"]
[tool.setuptools.package-data]
"shared.data" = ["*.npz"]
"""
PACKAGES = {"pyproject.toml": PYPROJECT, "shared/a.py": "", "shared/data/b.py": ""}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"refs/a.py": ""}, ["package refs is not declared"]),
        ({"shared/data/more/a.py": ""}, ["package shared.data.more is not declared"]),
        ({"shared/data/x.json": ""}, ["shared/data/x.json is not declared as package data"]),
        ({"shared/x.npz": ""}, ["shared/x.npz is not declared as package data"]),
        ({"shared/data/__pycache__/b.pyc": ""}, []),
    ],
)
def test_what_is_not_packaged_is_found(tmp_path, files, expected):
    plant(tmp_path, PACKAGES | {"shared/data/digits.npz": ""} | files)
    assert packaging_mismatches(tmp_path) == expected


def test_packages_that_do_not_exist_are_found(tmp_path):
    plant(tmp_path, {"pyproject.toml": PYPROJECT, "shared/a.py": ""})
    assert packaging_mismatches(tmp_path) == [
        "package shared.data does not exist",
        "package data shared.data: *.npz matches nothing",
    ]


@pytest.mark.parametrize(
    ("source", "exceptions", "expected"),
    [
        ("import torch, os, shared.a\nfrom pynvml import x\nimport tomli_w", {}, []),
        ("import torch\nimport tomli_w", {"nvidia-ml-py": "planted"}, []),
        ("import torch\nimport pynvml", {}, ["tomli-w is declared and not imported"]),
        (
            "import torch, pynvml, tomli_w\ndef f():\n    from scipy.stats import norm",
            {},
            ["shared/a.py:3 imports scipy, which no declared dependency provides"],
        ),
        (
            "import torch, pynvml, tomli_w, absent",
            {},
            ["shared/a.py:1 imports absent, which no declared dependency provides"],
        ),
        (
            "import torch, pynvml, tomli_w",
            {"torch": "planted", "gone": "planted"},
            ["the exception for gone is not needed", "the exception for torch is not needed"],
        ),
    ],
)
def test_a_wrong_dependency_is_found(tmp_path, source, exceptions, expected):
    plant(tmp_path, {"pyproject.toml": PYPROJECT, "shared/a.py": source})
    distributions = {
        "torch": ["torch"],
        "pynvml": ["nvidia-ml-py"],
        "tomli_w": ["tomli_w"],
        "scipy": ["scipy"],
    }
    assert dependency_mismatches(tmp_path, distributions, exceptions) == expected


def test_commands_are_taken_from_the_first_block_without_comments():
    readme = "# x\n```sh\na -e . && b  # says '#'\n\n# only a comment\nc\n```\n```sh\nd\n```\n"
    assert readme_commands(readme) == ["a -e . && b", "c"]


def test_a_command_that_ci_only_mentions_does_not_count():
    script = "# part 'a'\necho 'b'\npart 'c -e . && d'\n"
    assert ci_commands(script) == ["c -e . && d"]


def test_a_second_command_of_the_workflow_is_found():
    assert workflow_commands("      - run: .ci/run\n      - name: x\n        run: |\n") == [
        ".ci/run",
        "|",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`nox -s tests`, then `nox -R -s lint types`", {"tests", "lint", "types"}),
        ("nox -s tests -- -k name", {"tests"}),
        ("pip install nox && nox -s tests   # passes", {"tests"}),
        ("part 'nox --no-venv -s bench'", {"bench"}),
        ("nox -s tests && nox -s lint", {"tests", "lint"}),
        ("`nox` alone", set()),
    ],
)
def test_sessions_are_read_from_commands(text, expected):
    assert sessions_named(text) == expected


def test_sessions_are_read_from_the_noxfile():
    noxfile = "@nox.session\ndef a(session): ...\ndef helper(session): ...\n"
    assert nox_sessions(noxfile) == {"a"}


def test_two_versions_of_ruff_are_found(tmp_path):
    plant(tmp_path, {"pyproject.toml": 'lint = ["ruff~=1.0"]', PRE_COMMIT: '["ruff~=2.0"]'})
    assert ruff_versions(tmp_path) == {"ruff~=1.0", "ruff~=2.0"}


def test_a_failure_left_of_and_stops_the_ci_script(tmp_path):
    """`set -e` alone overlooks it."""
    functions = (ROOT / ".ci/run").read_text("utf-8").partition('"${PYTHON:-python3}"')[0]
    assert "part()" in functions
    plant(tmp_path, {"ci/run": functions + "part 'false && true'\npart 'echo b'\n"})
    done = subprocess.run(
        ["bash", tmp_path / "ci/run"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "== echo b" not in done.stdout
