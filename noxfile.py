"""Lanes of kd. Start with `nox -s dev`; before a change is done, run `nox` (the lanes marked *).

`nox -s LANE` runs one lane in an environment of its own; `nox -s LANE -- OPTIONS` passes options
on. Lanes install with pip, so the configuration of pip decides which build of torch they get.
"""

import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typecheck", "tests", "docs"]

# `KD_TORCH=2.15.0 nox -s LANE` runs a lane with another torch, in the environment that is there.
TORCH = os.environ.get("KD_TORCH", "2.13.0")
# What runs models in a browser, from npm.
ONNXRUNTIME_WEB = "1.30.0"
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
# Beside the oldest, which all other lanes use.
PYTHONS = ("3.12", "3.13", "3.14")
# The suite in parts, the most telling about torch first: what traces and transforms, what exports,
# random programs and operations, what asks little of torch. Each has its share of the time in
# percent, and what pytest is given. CI runs them one by one against the newest torch, as far as its
# time allows.
COMPILED = ("tests/integration", "tests/nn", "tests/core/torch")
EXPORTED = ("tests/export", "docs", "README.md")
COMPARED = (
    *("tests/fuzz", "tests/probabilistic"),
    *("tests/core/ops", "tests/core/containers", "tests/core/distributed"),
)
OTHERS = (
    *("tests", "packages"),  # pytest does not ignore what it is given itself, nor `testpaths`
    *(f"--ignore={path}" for path in COMPILED + EXPORTED + COMPARED),
)
PARTS = {
    "compiled": (28, COMPILED),
    "exported": (34, EXPORTED),
    "compared": (25, COMPARED),
    "others": (13, OTHERS),
}
# Libraries whose programs run on kd as they are; `vmas` imports `gym`.
CLIENTS = (
    *("torchrl==0.14.1", "rsl-rl-lib==5.5.1", "benchmarl==1.5.2", "vmas==1.5.2", "rl4co==0.7.0"),
    *("gym==0.26.2", "gym_notices==0.1.0", "verl==0.9.1", "TransferQueue==0.1.11"),
    *("lightning==2.6.6", "pytorch-lightning==2.6.6", "lightning-utilities==0.15.3"),
    *("torchmetrics==1.9.0", "pyrootutils==1.0.4", "robust-downloader==0.0.2"),
    *("torch-geometric==2.8.1", "nvidia-physicsnemo==2.2.2", "warp-lang==1.19.0"),
)
# Frameworks whose trained policies are exported.
POLICIES = (
    *("stable_baselines3==2.9.2", "sb3_contrib==2.9.2", "torchrl==0.14.1", "rsl-rl-lib==5.5.1"),
    *("skrl==2.1.1", "tianshou==2.0.1", "sensai-utils==1.6.0", "deepdiff==7.0.1"),
    *("rl_games==1.6.5", "gym==0.26.2", "gym_notices==0.1.0"),
    *("leapp==0.7.2", "lerobot==0.4.4", "draccus==0.10.0", "torchvision==0.28.0"),
    *("huggingface-hub==0.35.3", "datasets==4.5.0", "diffusers==0.35.2", "multiprocess==0.70.19"),
)
DISTRIBUTIONS = ("kd-core", "kd-nn", "kd-probabilistic", "kd-export")
# One thread: the machines are shared, and the figures of two runs stay comparable. Bytecode
# is kept: hundreds of tests and all clients start a Python, each of which would compile kd anew.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
# A process for each core; each holds torch, so not on every core of a large machine. A file stays
# in one process: the examples of a page build on each other, and what it exports is made once.
PARALLEL = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadfile")


def install(session: nox.Session, *groups: str, torch: str = TORCH) -> None:
    """Install torch, the tools of `groups` and all four packages, editable, in one pip command.

    One command, so that the exact pins between siblings are met by the local copies.
    """
    stand_on_base(session)
    wanted = [f"torch=={torch}"]
    for name in DISTRIBUTIONS:
        wanted += ["-e", f"packages/{name}" + ("[cli,onnx]" if name == "kd-export" else "")]
    for group in groups:
        wanted += ["--group", group]
    session.install(*wanted)
    session.env.update(ENVIRONMENT)


def stand_on_base(session: nox.Session) -> None:
    """Let an environment import what is in `KD_BASE`, if that is set: pip takes it for installed.

    A CUDA build of torch takes minutes and gigabytes; the lanes of one version share it. What is
    installed there has no script here: run `python -m pytest`.
    """
    base = os.environ.get("KD_BASE")
    if base is not None:
        shared = next(Path(base).resolve().glob("lib/python*/site-packages"))
        own = next(Path(session.virtualenv.location).glob("lib/python*/site-packages"))
        (own / "base.pth").write_text(f"{shared}\n", encoding="utf-8")


@nox.session
def base(session: nox.Session) -> None:
    """Install torch and what tests import, for lanes that share it: `KD_BASE=.nox/base nox ...`."""
    session.install(f"torch=={TORCH}", "--group", "test")


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train, export and verify the digits example, and draw its report picture."""
    install(session, "example")
    session.run("python", "examples/digits")


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """Create .venv/ with all four packages editable and every tool of the other lanes."""
    session.run(sys.executable, "-m", "venv", ".venv", external=True)
    wanted = [f"torch=={TORCH}", "--group", "dev", "-e", "packages/kd-export[cli,onnx]"]
    for name in DISTRIBUTIONS[:-1]:
        wanted += ["-e", f"packages/{name}"]
    session.run(".venv/bin/python", "-m", "pip", "install", "--upgrade", "pip", external=True)
    session.run(".venv/bin/python", "-m", "pip", "install", *wanted, external=True)
    session.log("ready: run `source .venv/bin/activate`")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite against the default torch: `nox -s tests -- tests/core -k index`."""
    install(session, "suite")
    session.run("pytest", *PARALLEL, *session.posargs)


@nox.session
@nox.parametrize("torch", TORCHES, ids=[f"torch-{version}" for version in TORCHES])
def matrix(session: nox.Session, torch: str) -> None:
    """Run the test suite against one supported torch: `nox -s "matrix(torch-2.10.0)"`."""
    install(session, "suite", torch=torch)
    session.run("python", "-m", "pytest", *PARALLEL, *session.posargs)


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """Run the test suite under another Python, if it is installed: `nox -s pythons-3.13`."""
    install(session, "suite")
    session.run("pytest", *PARALLEL, *session.posargs)


@nox.session
def formats(session: nox.Session) -> None:
    """Run the tests of formats whose packages the other lanes do not install."""
    install(session, "suite", "formats")
    session.install("--no-deps", "tritonclient==2.73.0")  # it asks for an older protobuf
    names = ("executorch", "openvino", "onnx_opinions")
    tests = [f"tests/export/backends/test_{name}.py" for name in names]
    tests.append("tests/export/test_precision.py")  # so that one table has all formats
    if shutil.which("npm") is not None:  # what a browser runs models by
        folder = session.create_tmp()
        packages = ("install", "--no-audit", "--no-fund", "--prefix", folder)
        session.run("npm", *packages, f"onnxruntime-web@{ONNXRUNTIME_WEB}", external=True)
        session.env["KD_NODE_MODULES"] = f"{folder}/node_modules"
    tests += [
        *(f"tests/export/test_{name}.py" for name in ("clients", "compiled_clients")),
        *(f"tests/export/test_{name}.py" for name in ("handover", "page")),
        "tests/core/convert",
        "tests/export/test_golden.py",
        "tests/integration/test_exported_distributions.py",
        "tests/fuzz/test_forged_files.py",
        "tests/interop/test_redis.py",  # which starts a `redis-server`: install that first
    ]
    session.run("pytest", *tests, *session.posargs)


@nox.session
def litert(session: nox.Session) -> None:
    """Run the tests of `.tflite` files; the converter is heavy, and brings a torchao of its own."""
    install(session, "suite", "litert")
    # A plugin for pytest that it brings asks for names that pytest gives with a warning only.
    options = ("-p", "no:anyio")
    session.run("pytest", *options, "tests/export/backends/test_litert.py", *session.posargs)


@nox.session
def interop(session: nox.Session) -> None:
    """Run containers through real trainers and actors, and exchange them with the peer."""
    install(session, "test", "trainers", "actors", "peer")
    session.run("pytest", "tests/interop", "tests/fuzz/test_vmap.py", *session.posargs)


@nox.session
def clients(session: nox.Session) -> None:
    """Run programs of libraries that build on tensordict under kd and under it; compare numbers."""
    install(session, "test", "clients")
    # Without their dependencies: some ask for an older peer, some bring another torch.
    session.install("--no-deps", *CLIENTS)
    # What tests print is their figures: shown at the end, for those that pass, too.
    session.run("pytest", "-rP", "benchmarks/clients/test_clients.py", *session.posargs)


@nox.session
def policies(session: nox.Session) -> None:
    """Export policies of other frameworks; compare the files with the frameworks' own predict."""
    install(session, "suite", "policies")
    session.install("--no-deps", *POLICIES)  # they ask for another torch
    session.run("pytest", "tests/policies", *session.posargs)


@nox.session
def models(session: nox.Session) -> None:
    """Export architectures of other libraries, with random weights, in every format."""
    install(session, "suite", "trainers", "models")
    session.run("pytest", "tests/models", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Run random programs, MINUTES for each harness: `nox -s fuzz -- 30 -k plans` (default 5)."""
    minutes, *options = session.posargs or ["5"]
    if not minutes.isdecimal():
        session.error(f"expected a number of minutes first, got `{minutes}`: `nox -s fuzz -- 30`")
    install(session, "suite", "peer")
    beside_the_peer = [f"tests/interop/test_{name}.py" for name in ("programs", "chains_of_calls")]
    tests = ("tests/fuzz", *beside_the_peer)
    session.run("pytest", *tests, *options, env={"KD_FUZZ_MINUTES": minutes})


@nox.session
def lint(session: nox.Session) -> None:
    """Check format, lint rules and what may import what."""
    session.install("--group", "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    sources = ":".join(f"packages/{name}/src" for name in DISTRIBUTIONS)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})


@nox.session
def typecheck(session: nox.Session) -> None:
    """Run mypy --strict over the packages, tests and tools, and pyright over what users write."""
    install(session, "typecheck")
    session.run("mypy", *session.posargs)
    session.run("basedpyright")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages without a warning, and run their C++; `tests` runs their Python."""
    install(session, "docs")
    session.run("sphinx-build", "-n", "-W", "--keep-going", "-q", "docs", "docs/_build")
    session.run("python", "tools/run_cpp.py")


@nox.session
def build(session: nox.Session) -> None:
    """Build the four sdists and wheels into dist/, and check their content."""
    session.install("--group", "build")
    shutil.rmtree("dist", ignore_errors=True)
    for name in DISTRIBUTIONS:
        session.run("python", "-m", "build", "--outdir", "dist", f"packages/{name}")
    files = sorted(str(path) for path in Path("dist").iterdir())
    session.run("twine", "check", "--strict", *files)
    session.run("check-wheel-contents", *(file for file in files if file.endswith(".whl")))


@nox.session(name="release-check", reuse_venv=False)
@nox.parametrize("distribution", DISTRIBUTIONS, ids=DISTRIBUTIONS)
def release_check(session: nox.Session, distribution: str) -> None:
    """Install one wheel of dist/ alone, check what it brings, and run its tests: after `build`."""
    wheels = sorted(Path("dist").glob(f"{distribution.replace('-', '_')}-*.whl"))
    if not wheels:
        session.error(f"wheel of `{distribution}` not found in dist/. Run `nox -s build` first")
    wheel = wheels[0]
    stand_on_base(session)
    torch = f"torch=={TORCH}"
    session.install("--find-links", "dist", torch, str(wheel), "--group", "test")
    session.run("python", "tools/check_wheel.py", distribution, env=ENVIRONMENT)
    if distribution == "kd-export":
        session.install(torch, f"{wheel}[cli,onnx]")
    area = distribution.removeprefix("kd-")
    session.run("python", "-m", "pytest", f"tests/{area}", *session.posargs, env=ENVIRONMENT)


@nox.session
def bench(session: nox.Session) -> None:
    """Time kd beside the peer and write the benchmark page; `-- --quick` and others only print."""
    install(session, "bench")
    if session.posargs:
        session.run("python", "benchmarks/peer.py", *session.posargs)
        return
    folder = Path(session.create_tmp())
    peer, costs, programs = (str(folder / f"{name}.json") for name in ("peer", "costs", "programs"))
    session.run("python", "benchmarks/peer.py", "--json", peer)
    session.run("python", "benchmarks/costs.py", "--json", costs)
    session.run("python", "benchmarks/collectives.py")
    session.run("python", "-m", "benchmarks.programs", "--rounds", "13", "--json", programs)
    for options in (
        ["--rounds", "5"],
        ["--whole"],
        ["--backend", "inductor"],
        ["--backend", "inductor", "--mode", "reduce-overhead"],
    ):
        session.run("python", "-m", "benchmarks.programs.compiled", *options)
    session.run("python", "-m", "benchmarks.render", peer, costs, programs)


@nox.session
def released(session: nox.Session) -> None:
    """Fail if a program takes 3 % more than at the last release: `nox -s released -- COMMIT`."""
    if not session.posargs:
        session.error("expected the commit of the last release: `nox -s released -- COMMIT`")
    install(session, "suite")
    commit, *options = session.posargs
    session.run("python", "-m", "benchmarks.programs", "--against", commit, *options)


@nox.session
def gpu(session: nox.Session) -> None:
    """Test and time kd on a GPU, in 8 minutes: `nox -s gpu -- RESULTS`; see `tools/gpu_lane.sh`."""
    install(session, "suite", "peer")
    session.run("tools/gpu_lane.sh", *session.posargs, external=True)


@nox.session
def generate(session: nox.Session) -> None:
    """Write the generated methods and pages from their tables (`-- --check`: only compare)."""
    session.install("--group", "lint")
    session.run("python", "tools/generate_ops.py", *session.posargs)
    session.run("python", "tools/render_decided.py", *session.posargs)


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Write a new version into VERSION, the packages and their pins: `nox -s bump -- 0.2.0`."""
    session.run(sys.executable, "tools/bump.py", *session.posargs, external=True)


@nox.session
def changelog(session: nox.Session) -> None:
    """Move the fragments of changelog.d/ into CHANGELOG.md (`-- --draft`: only print)."""
    session.install("--group", "changelog")
    version = Path("VERSION").read_text(encoding="utf-8").strip()
    options = session.posargs or ["--yes"]
    session.run("towncrier", "build", "--name", "kd", "--version", version, *options)
