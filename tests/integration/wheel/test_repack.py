"""`patchkit repack` on small wheels with real libraries: what it makes and what it refuses."""

import json
import shutil
import sys
import zipfile
from dataclasses import replace

import pytest

from patchkit.edit.splice import git_diff
from patchkit.errors import (
    DriftError,
    HashMismatchError,
    ProofError,
    SourceError,
    UsageError,
)
from patchkit.patching.fix import Request
from patchkit.patching.user_patch import read_patches
from patchkit.source.releases import LockEntry
from patchkit.source.tree import Sandboxed
from patchkit.target import targets
from patchkit.wheel.build import machine
from patchkit.wheel.device.inspect import inspect_file, inspect_wheel
from patchkit.wheel.file.wheelfile import WheelFile, find_faults
from patchkit.wheel.repack import repack
from patchkit.wheel.repack.repack import find_wheel, repack_wheel
from patchkit.wheel.wheelhouse.pins import read_listed_wheels
from patchkit.wheel.wheelhouse.storage import load_manifest
from patchkit.wheel.wheelhouse.verify import check_files, find_unfit
from support import run_program
from support.building import PATCHKIT
from support.needed import need_ptxas
from support.vllm_wheels import (
    FIX,
    KERNELS,
    LIBRARIES,
    LOST,
    NAME,
    PATCHED,
    VERSION,
    python_of,
    sha256,
    vllm_wheel,
)
from support.wheels import write_wheel


def quiet(_task):
    return lambda _done, _total: None


def found(spec, *, cpu="aarch64", digest=None):
    return find_wheel(str(spec), cpu, sha256=digest, offline=True, report=quiet)


def repacked(spec, request, house, assembler=None, **which):
    with found(spec, **which) as origin:
        return repack_wheel(
            origin,
            request,
            house,
            report=quiet,
            sandboxed=Sandboxed.ALWAYS,
            assembler=assembler,
            say=lambda _line: None,
        )


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "WORK", tmp_path / "work")


@pytest.fixture
def run(house):
    """Repack a file that is vouched for, with one fix: ``run(wheel, target="thor")``."""

    def make(wheel, *, target="gb10", only=(FIX,), cpu="aarch64"):
        request = Request(target=targets()[target], only=frozenset(only))
        return repacked(wheel, request, house, cpu=cpu, digest=sha256(wheel))

    return make


@pytest.fixture
def known(monkeypatch):
    """Make a file known to the lock, as if it were upstream's."""

    def lock(wheel, cpu="aarch64"):
        entry = LockEntry(
            version=VERSION,
            filename=wheel.name,
            sha256=sha256(wheel),
            size=wheel.stat().st_size,
        )
        monkeypatch.setattr(
            repack, "upstream_wheels", lambda _project, _cpu: {VERSION: entry}
        )
        return wheel

    return lock


UNCHANGING = FIX  # where the text is as the fix makes it
WITH_FIX = Request(target=targets()["gb10"], only=frozenset({FIX}))
X86 = NAME.replace("aarch64", "x86_64")


def read(wheel, ending):
    with zipfile.ZipFile(wheel) as bundle:
        (path,) = (name for name in bundle.namelist() if name.endswith(ending))
        return bundle.read(path).decode()


def test_one_version_everywhere(run, tmp_path):
    done = run(vllm_wheel(tmp_path))
    facts = json.loads(read(done.wheel, "/patchkit.json"))
    version = facts["wheel"]
    assert version.startswith("0.19.1+cu130.gb10.")
    # The glibc of the tag is the one that is needed.
    tag = "cp38-abi3-manylinux_2_29_aarch64"
    assert done.wheel.name == f"vllm-{version}-{tag}.whl"
    assert f"Tag: {tag}\n" in read(done.wheel, "/WHEEL")
    text = read(done.wheel, "vllm/_version.py")
    names = {}
    exec(text.replace("version_tuple: tuple[int | str, ...]\n", ""), names)
    assert names["__version__"] == names["version"] == version
    assert names["__version_tuple__"] == (0, 19, 1, version.partition("+")[2])
    metadata = read(done.wheel, "/METADATA")
    assert f"\nVersion: {version}\n" in metadata
    assert metadata.endswith("\n\nVersion: not this one\n")
    assert list(find_faults(done.wheel)) == []
    assert check_files(done.wheel.parent) == ()


def test_a_wheel_of_another_cuda_does_not_claim_the_targets(run, tmp_path):
    def older(members):
        data = members["vllm/_C.abi3.so"]
        members["vllm/_C.abi3.so"] = data.replace(
            b"libcudart.so.13", b"libcudart.so.12"
        )
        del members["vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"]

    done = run(vllm_wheel(tmp_path, change=older))
    assert done.facts["wheel"].startswith("0.19.1+cu12.gb10.")
    assert "linked with CUDA 12 (libcudart.so.12), not with 13.0" in done.notes[1]


def test_a_wheel_is_of_the_cuda_of_its_torch(run, tmp_path):
    def later(members):
        (home,) = (name for name in members if name.endswith("/METADATA"))
        members[home] = members[home].replace(b"torch==2.10.0", b"torch==2.15.0")

    done = run(vllm_wheel(tmp_path, change=later))
    assert done.facts["wheel"].startswith("0.19.1+cu132.gb10.")


def test_kernels_that_do_not_serve_the_device(run, house, tmp_path):
    with pytest.raises(ProofError, match=r"_C\.abi3\.so: does not load") as caught:
        run(vllm_wheel(tmp_path), target="thor")
    assert "patchkit build vllm --version 0.19.1 --target thor" in caught.value.hint
    stock = dict.fromkeys(KERNELS, KERNELS["vllm/_moe_C.abi3.so"])
    with pytest.raises(ProofError, match="need no libcudart"):
        run(vllm_wheel(tmp_path, libraries=stock))
    both = {
        **KERNELS,
        "vllm/_moe_C.abi3.so": LOST.replace(b"cudart.so.13", b"cudart.so.12"),
    }
    with pytest.raises(ProofError, match="need 12 and 13 libcudart"):
        run(vllm_wheel(tmp_path, libraries=both))
    assert not house.exists()


def test_native(house, tmp_path):
    """PTX becomes machine code, libraries for other devices stay, and `verify` looks again."""
    assembler = need_ptxas()
    flash, ptx = (
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        LIBRARIES / "ptx-aarch64.so",
    )
    wheel = vllm_wheel(tmp_path, libraries={**KERNELS, flash: ptx.read_bytes()})
    done = repacked(wheel, WITH_FIX, house, assembler, digest=sha256(wheel))
    hopper = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
    native = done.facts["native"]
    assert native["compiled_at_first_use"] == {}
    assert {name: len(digests) for name, digests in native["assembled"].items()} == {
        flash: 3
    }
    assert "3 fat binaries assembled" in "\n".join(done.notes)
    assert list(find_faults(done.wheel)) == []
    with zipfile.ZipFile(done.wheel) as bundle:
        assert bundle.read(hopper) == KERNELS[hopper]
        assert bundle.read(flash) != ptx.read_bytes()
    (listed,), _ = read_listed_wheels(house, load_manifest(house).wheels)
    assert list(find_unfit(listed)) == []
    # Only what was claimed of it is not true of upstream's wheel.
    plain = vllm_wheel(
        tmp_path / "stock", libraries={**KERNELS, flash: ptx.read_bytes()}
    )
    with WheelFile(plain) as opened:
        stock = replace(listed, binaries=inspect_wheel(opened))
    assert [each.what for each in find_unfit(stock)] == [
        f"{flash} is not native, though patchkit.json says it is"
    ]
    # A wheel of an earlier patchkit, which named what the release never calls.
    never = {"never_called": {flash: ["kernels"]}}
    facts = {**done.facts, "native": {**native, **never}}
    metadata = replace(stock.metadata, facts=facts)
    entry = replace(stock.entry, facts=facts)
    assert list(find_unfit(replace(stock, metadata=metadata, entry=entry))) == []


def test_native_where_no_fix_changes_anything(cli, house, tmp_path):
    """Then there is no ledger either: the wheel is upstream's, but for its machine code."""
    assembler = need_ptxas()
    flash, ptx = (
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        LIBRARIES / "ptx-aarch64.so",
    )
    patched = {PATCHED.path: PATCHED.after.encode()}
    wheel = vllm_wheel(
        tmp_path,
        libraries={**KERNELS, flash: ptx.read_bytes()},
        change=lambda members: members.update(patched),
    )
    none = Request(target=targets()["gb10"], only=frozenset({UNCHANGING}))
    with pytest.raises(UsageError, match="no fix changes anything") as refused:
        repacked(wheel, none, house, digest=sha256(wheel))
    assert "--native" in refused.value.hint
    done = repacked(wheel, none, house, assembler, digest=sha256(wheel))
    first = done.wheel.read_bytes()
    assert (done.facts["native"]["compiled_at_first_use"], done.outcome.written) == (
        {},
        (),
    )
    assert list(find_faults(done.wheel)) == []
    with zipfile.ZipFile(done.wheel) as bundle:
        assert not [name for name in bundle.namelist() if ".patchkit" in name]
        assert bundle.read(flash) != ptx.read_bytes()
    assert json.loads(cli("inspect", done.wheel, "--json").stdout)
    shutil.rmtree(house)
    assert (
        repacked(wheel, none, house, assembler, digest=sha256(wheel)).wheel.read_bytes()
        == first
    )


def test_native_where_there_is_nothing_to_assemble_either(house, tmp_path):
    """Such a wheel would be upstream's by another name."""
    assembler = need_ptxas()
    patched = {PATCHED.path: PATCHED.after.encode()}
    wheel = vllm_wheel(
        tmp_path, libraries=KERNELS, change=lambda members: members.update(patched)
    )
    none = Request(target=targets()["gb10"], only=frozenset({UNCHANGING}))
    with pytest.raises(UsageError, match="no fix changes anything") as refused:
        repacked(wheel, none, house, assembler, digest=sha256(wheel))
    assert "--native" not in refused.value.hint
    assert not house.exists()


def test_a_wheel_s_own_ledger_proves_nothing(run, house, tmp_path):
    """It says that all is done and proved. Whoever made the wheel may say so of any text."""
    assembler = need_ptxas()
    first = run(vllm_wheel(tmp_path))
    with zipfile.ZipFile(first.wheel) as bundle:
        names = [name for name in bundle.namelist() if "/.patchkit/" in name]
        claims = {name: bundle.read(name) for name in (*names, PATCHED.path)}
    version = first.facts["wheel"].encode()
    claims = {
        name: data.replace(version, VERSION.encode()) for name, data in claims.items()
    }
    flash = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
    wheel = vllm_wheel(
        tmp_path / "again",
        libraries={**KERNELS, flash: (LIBRARIES / "ptx-aarch64.so").read_bytes()},
        change=lambda members: members.update(claims),
    )
    again = repacked(wheel, WITH_FIX, house, assembler, digest=sha256(wheel))
    assert again.outcome.recorded_by == ""
    assert again.outcome.proofs == first.outcome.proofs != ()


@pytest.mark.parametrize(
    ("promised", "tag"),
    [("2_28", "manylinux_2_29_aarch64"), ("2_39", "manylinux_2_39_aarch64")],
)
def test_a_tag_never_promises_less_than_the_libraries_need(
    run, tmp_path, promised, tag
):
    wheel = vllm_wheel(tmp_path, name=NAME.replace("2_28", promised))
    assert run(wheel).wheel.name.endswith(f"-{tag}.whl")


@pytest.mark.parametrize("version", [(9, 0), (9, 2)])
def test_ptx_that_older_drivers_do_not_compile_is_told(run, tmp_path, version):
    flash = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
    data = bytearray((LIBRARIES / "ptx-aarch64.so").read_bytes())
    binary = inspect_file(LIBRARIES / "ptx-aarch64.so")
    for entry in binary.live:
        major, minor = version
        data[entry.offset + 24 : entry.offset + 28] = bytes([minor, 0, major, 0])

    def later(members):
        (home,) = (name for name in members if name.endswith("/METADATA"))
        members[home] = members[home].replace(b"torch==2.10.0", b"torch==2.15.0")

    done = run(
        vllm_wheel(tmp_path, libraries={**KERNELS, flash: bytes(data)}, change=later)
    )
    told = [note for note in done.notes if "drivers older than" in note]
    newer = ["drivers older than 595.45.04 do not compile PTX of CUDA 13.2"]
    assert told == (newer if version > (9, 0) else [])


def test_the_folder_is_looked_at_first(cli):
    """Before a wheel is fetched, of which an offline run has none."""
    done = cli("repack", "vllm==0.33.0", "--offline", "--dir", "/proc/house", rc=7)
    assert "/proc/house: not a folder that can be written to" in done.stderr


def test_twice_is_once_and_a_repack_is_not_repacked(run, known, house, tmp_path):
    source = known(vllm_wheel(tmp_path))
    first = run(source)
    data = first.wheel.read_bytes()
    again = run(source)
    assert (first.fresh, again.fresh, again.wheel) == (True, False, first.wheel)

    shutil.rmtree(house)
    assert run(source).wheel.read_bytes() == data

    copy = shutil.copy(first.wheel, tmp_path)
    with pytest.raises(UsageError, match="made it already, for gb10") as caught:
        repacked(copy, WITH_FIX, house)
    assert f"patchkit repack vllm=={VERSION} --cpu aarch64" in caught.value.hint


def test_a_patch_is_in_the_wheels_identity_and_goes_where_it_is_installed(
    house, cli, tmp_path
):
    diff, site, path = tmp_path / "a.diff", tmp_path / "site", "vllm/__init__.py"
    diff.write_text(
        git_diff(path, "from vllm._version import __version__\n", "# patched\n")
    )
    request, wheel = (
        replace(WITH_FIX, patches=read_patches([diff])),
        vllm_wheel(tmp_path),
    )
    alone, done = (
        repacked(wheel, it, house, digest=sha256(wheel)) for it in (WITH_FIX, request)
    )
    assert alone.facts["wheel"] != done.facts["wheel"]
    assert done.facts["patches"] == [
        {"id": "patch-a", "title": "a", "sha256": sha256(diff)}
    ]
    zipfile.ZipFile(done.wheel).extractall(site)
    # What the wheel was made of is the default; who names fixes or patches chooses anew.
    assert "nothing to do" in cli("apply", site / "vllm").stdout
    assert (site / path).read_text() == "# patched\n"
    cli("apply", site / "vllm", "--only", FIX)
    assert (site / path).read_text() == "from vllm._version import __version__\n"


@pytest.mark.e2e
@pytest.mark.releases
def test_an_installed_repack_keeps_the_fixes_that_lost_kernels_asked_for(
    run, known, release, cli, tmp_path
):
    """The Python of 0.19.1 over kernels that a GB10 does not get, installed and patched again."""
    python, home = python_of(release(VERSION)), tmp_path / "venv"
    machine = (62).to_bytes(2, "little")  # EM_X86_64
    elsewhere = {
        name: data[:18] + machine + data[20:] for name, data in KERNELS.items()
    }
    wheel = vllm_wheel(
        tmp_path, name=X86, libraries=elsewhere, change=lambda m: m.update(python)
    )
    done = run(known(wheel, "x86_64"), cpu="x86_64", only=())
    run_program(sys.executable, "-m", "venv", "--without-pip", home)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "bin/python",
        "install",
        "--no-index",
    ]
    run_program(*pip, "--no-deps", done.wheel)
    packages, facts = next(home.glob("lib/python*/site-packages")), done.facts
    source, chosen = (
        ["--vllm-src", packages / "vllm"],
        {"fp8_block_triton", "fp8_linear_torch"},
    )
    assert facts["turned_on"] == ["fp8_block_triton"]

    def fixes(state, verb, *options):
        told = json.loads(cli(verb, *source, *options, "--json").stdout)["fixes"]
        return {fix["id"] for fix in told if fix["state"] == state}

    assert "nothing to do" in cli("apply", *source).stdout
    made = fixes("applied", "fixes")
    assert chosen < made
    # Who names fixes chooses anew, and a reverted package knows of no choice.
    assert fixes("applied", "apply", "--without", "fp8_linear_torch") == made - chosen
    cli("revert", *source)
    assert fixes("apply", "fixes") == made - {"fp8_block_triton"}


def test_on_the_command_line(environment, house, tmp_path):
    wheel = vllm_wheel(tmp_path)

    def patchkit(*arguments, rc=0):
        words = (*PATCHKIT, tmp_path / "work", "repack", *arguments, "--dir", house)
        return run_program(*words, rc=rc, env=environment)

    options = ("--only", FIX, "--sha256", sha256(wheel))
    refused = patchkit(wheel, rc=UsageError.exit_code)
    assert f"--sha256 {sha256(wheel)} takes it nonetheless" in refused.stderr
    shown = patchkit(wheel, *options).stdout
    assert "loads in part" in shown
    # It is for a Spark's CPU, and here may be another one.
    assert (
        "next: pip install" in shown
        or "next, there, in vLLM's environment: pip" in shown
    )
    told = json.loads(patchkit(wheel, *options, "--json").stdout)
    assert (told["fresh"], told["source"]["upstream"]) == (False, False)
    assert told["wheel"] == str(next(house.glob("*.whl")))


def locked(spec, **which):
    with found(spec, **which) as origin:
        return origin.locked


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: p / "absent.whl", UsageError, "no such file"),
        (
            lambda p: write_wheel(p, "1.0", project="other"),
            SourceError,
            "of other, not of vllm",
        ),
        (
            lambda p: vllm_wheel(p, name=X86),
            UsageError,
            "is for x86_64, not for aarch64",
        ),
        (lambda p: "vllm==9.9.9", SourceError, "is not among the releases"),
        (lambda p: "vllm==0.10.0", SourceError, "0.10.0 is not supported"),
        (
            lambda p: "vllm==0.15.1",
            SourceError,
            "wheels on the package index and no sdist",
        ),
        (
            lambda p: vllm_wheel(p, name=NAME.replace("2_28", "2_31")),
            *(HashMismatchError, "but the lock says c8dde3c9af20"),
        ),
        (
            lambda p: vllm_wheel(p),
            UsageError,
            "is not among upstream's wheels that this patchkit",
        ),
    ],
)
def test_what_is_not_taken(tmp_path, make, error, words):
    with pytest.raises(error, match=words):
        locked(make(tmp_path))


def test_hashes_that_are_named(tmp_path):
    wheel = vllm_wheel(tmp_path)
    assert not locked(wheel, digest=sha256(wheel).upper())
    with pytest.raises(HashMismatchError, match="not 0000"):
        locked(wheel, digest="0" * 64)
    with pytest.raises(UsageError, match="is not a sha256"):
        locked(wheel, digest="abc")
    with pytest.raises(UsageError, match="--sha256 is for a file"):
        locked("vllm==0.25.1", digest="0" * 64)


def test_the_wheel_that_was_hashed_is_the_one_that_is_repacked(house, tmp_path):
    wheel, other = vllm_wheel(tmp_path), vllm_wheel(tmp_path / "other", libraries={})
    digest = sha256(wheel)
    with found(wheel, digest=digest) as origin:
        other.replace(wheel)
        done = repack_wheel(
            origin,
            WITH_FIX,
            house,
            report=quiet,
            sandboxed=Sandboxed.ALWAYS,
            assembler=None,
            say=lambda _line: None,
        )
    assert (done.facts["source"], done.facts["cuda"]) == (f"sha256:{digest}", "13")
    assert check_files(house) == ()


def test_nothing_to_change(run, house, tmp_path):
    done = {PATCHED.path: PATCHED.after.encode()}
    with pytest.raises((UsageError, DriftError)):
        run(vllm_wheel(tmp_path, change=lambda members: members.update(done)))
    assert not house.exists()
