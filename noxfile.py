"""What can be checked and measured here; `nox --list` shows it."""

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
LOWEST = ("torch==2.9.1", "torchvision==0.24.1", "torchaudio==2.9.1")

EVERYTHING = ("-n", "auto", "--dist=loadfile")
"""What the tests do when nothing is selected: all of it, in parallel, and once with coverage.

A file is the work of one process, so that what its tests share is made once.
A selection (a path, `-k name`) runs in one process, so that `--pdb` works and the coverage of a
part is not mistaken for that of the whole.
"""


def install(session: nox.Session, *args: str) -> None:
    """Install into a virtual environment of nox's own, and leave any other alone.

    Under `--no-venv` the environment is the user's, with a build of torch that was chosen for its
    GPU: nothing is added to it or upgraded.
    """
    if session.venv_backend == "none":
        session.log(f"using this environment as it is; not installing {' '.join(args)}")
    else:
        session.install(*args)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, its rules and its format; `-- --fix` mends what it can."""
    install(session, *PYPROJECT["project"]["optional-dependencies"]["lint"])
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]))


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict on `shared`, against the annotations of the real torch."""
    required = PYPROJECT["project"]["dependencies"]
    # mypy reads sources and never imports them, so the gigabytes of CUDA libraries that torch
    # depends on can stay away: a third of the time, and the same types.
    torch_family = [requirement for requirement in required if requirement.startswith("torch")]
    others = [requirement for requirement in required if requirement not in torch_family]
    install(session, *others, *PYPROJECT["project"]["optional-dependencies"]["types"])
    install(session, "--no-deps", *torch_family)
    session.run("mypy", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests but the long ones, on the newest versions; `-- -k name` selects."""
    install(session, "-e", ".[tests]")
    arguments = session.posargs or (*EVERYTHING, "--cov", "--cov-report=term")
    session.run("python", "-m", "pytest", "-m", "not stress", *arguments)


@nox.session
def tests_lowest(session: nox.Session) -> None:
    """The same tests, but for the slow ones, on the oldest torch that is supported."""
    install(session, "-e", ".[tests]", *LOWEST)
    quick = "not stress and not slow"
    session.run("python", "-m", "pytest", "-m", quick, *(session.posargs or EVERYTHING))


@nox.session
def stress(session: nox.Session) -> None:
    """The long fault tests: hundreds of killed and resumed runs."""
    install(session, "-e", ".[tests]")
    session.run("python", "-m", "pytest", "-m", "stress", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this machine; `-- --quick` in minutes, `--no-venv` with the torch that is here."""
    install(session, "-e", ".")
    session.run("python", "-m", "pytest", "bench", *session.posargs)
