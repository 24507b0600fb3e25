"""FlashInfer's releases and its installed package, patched, proved and put back."""

import re
import subprocess
import sys
import tarfile

import pytest
from packaging.version import Version

from patchkit.apply import apply, revert
from patchkit.patching.recipe import load_recipe
from patchkit.source.releases import read_lock, read_wheel_lock
from support.selection import DAILY, SUPPORTED, WHOLE

RECIPE = load_recipe("flashinfer")
LOCK = read_lock(RECIPE.home / "lock.toml")
PATH = "flashinfer/jit/cpp_ext.py"
PARTS = ("PKG-INFO", "pyproject.toml", "build_backend.py", PATH)
PROOF = (
    "ninja is told -j 10 for CUTLASS in 116 GiB, -j 3 in 45, -j 1 in 15, "
    "-j 2 in a container of 36 GiB; "
    "before: none, and by itself it starts 22 on 20 cores"
)
# The oldest, what vLLM 0.25 pins, and the form with a parameter max_jobs; the matrix asks all.
RELEASES = tuple(LOCK) if WHOLE else ("0.5.2", "0.6.13", "0.7.2.post1")


@pytest.fixture
def flashinfer(fetched, tmp_path):
    """Make a tree of what patchkit reads of a release: ``flashinfer("0.6.13")``."""

    def make(version):
        entry = LOCK[version]
        folder = entry.filename.removesuffix(".tar.gz")
        wanted = {f"{folder}/{part}" for part in PARTS}
        with tarfile.open(fetched("flashinfer-python", entry)) as archive:
            for member in archive:
                if member.name in wanted:
                    archive.extract(member, tmp_path, filter="data")
                    wanted.remove(member.name)
                if not wanted:
                    break
        return tmp_path / folder

    return make


@pytest.mark.parametrize("version", SUPPORTED if WHOLE else DAILY)
def test_the_lock_has_what_vllm_pins(version, release):
    text = (release(version) / "requirements/cuda.txt").read_text()
    (pin,) = re.findall(r"^flashinfer-python==(\S+)", text, re.MULTILINE)
    assert pin in LOCK
    (need,) = RECIPE.fix("jit_jobs").needs
    assert need.covers(Version(pin))


@pytest.mark.parametrize("release", RELEASES)
def test_apply_prove_and_revert(release, flashinfer, ask, snapshot):
    root = flashinfer(release)
    before = snapshot(root)
    done = apply(root, RECIPE, ask())
    assert (done.written, done.proofs) == ((PATH,), (PROOF,))
    compile((root / PATH).read_text(), PATH, "exec")
    assert apply(root, RECIPE, ask()).written == ()
    assert revert(root, "flashinfer") == (PATH,)
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("before", "after", "rc", "message"),
    [
        ("-j", "-k", 4, "1 of 1 fixes do not fit"),
        # The user's own number must count.
        ("return int(max_jobs)", "return None", 5, "ninja would be told"),
        (
            'command += ["-j", str(num_workers)]',
            'command += ["-j", str(num_workers)]\n    command += ["-j", "99"]',
            5,
            "ninja would be told",
        ),
    ],
)
def test_altered_code(flashinfer, ask, cli, before, after, rc, message):
    root = flashinfer("0.7.2.post1")
    text = (root / PATH).read_text()
    assert text.count(before) == 1
    (root / PATH).write_text(text.replace(before, after))
    assert message in cli("apply", root, rc=rc).stderr
    assert (root / PATH).read_text() == text.replace(before, after)


def test_an_installed_package(tmp_path, cli):
    site = tmp_path / "site"
    words = ["pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    done = subprocess.run(
        [sys.executable, "-m", *words, "flashinfer-python==0.6.13"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(done.stderr)

    package = site / "flashinfer"
    stock = (site / PATH).read_text()
    assert PROOF in cli("apply", package).stdout
    assert "applied" in cli("fixes", package).stdout
    record = next(site.glob("flashinfer_python-*.dist-info/RECORD")).read_text()
    assert "flashinfer/.patchkit/ledger.json" in record
    cli("revert", package)
    assert (site / PATH).read_text() == stock


def test_the_wheel_of_a_release(fetched, house, cli):
    wheels = read_wheel_lock(RECIPE.home / "wheels.toml")["any"]
    assert wheels.keys() == LOCK.keys()
    fetched("flashinfer-python", wheels["0.6.13"])
    shown = cli("repack", "flashinfer==0.6.13", "--dir", house).stdout
    assert f"proved {PROOF}" in " ".join(shown.split())
    (wheel,) = house.glob("*.whl")
    assert wheel.name.startswith("flashinfer_python-0.6.13+gb10.")
    assert "1 wheel, all as listed" in cli("verify", house).stdout
