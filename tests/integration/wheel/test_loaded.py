"""Which libnccl is loaded: foretold from the files, and done by the real dynamic loader."""

import hashlib
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from support import write_files
from support.layout import VERSIONS, Environment, link
from support.wheels import write_wheel


@pytest.fixture
def env(parts, tmp_path):
    return Environment(parts, tmp_path)


# Each prepares an environment. What is expected stands beside: who answers torch, who answers
# vLLM, how many copies are mapped, and words of the warnings.


def library_path(env):
    env.variables["LD_LIBRARY_PATH"] = str(Path(env.put("custom")).parent)


def preload(env):
    env.variables["LD_PRELOAD"] = env.put("custom")


def so_path(env):
    env.variables["VLLM_NCCL_SO_PATH"] = env.put("custom")


def so_path_is_missing(env):
    env.variables["VLLM_NCCL_SO_PATH"] = "~/libnccl.so.2"


def file_replaced(env):
    env.put("custom", env.pip_copy)


def runpath_without_preload(env):
    env.torch("runpath")
    library_path(env)
    env.without_preload()


def second_site(env):
    env.variables["PYTHONPATH"] = str(env.home / "second")
    env.put("second site", env.home / "second/nvidia/nccl/lib/libnccl.so.2")


def library_path_of_another_cpu(env):
    env.pip_copy.unlink()
    library_path(env)
    place = Path(env.put("third"))
    data = bytearray(place.read_bytes())
    data[18:20] = (0xB7 if data[18] != 0xB7 else 0x3E, 0)  # e_machine
    place.write_bytes(data)
    env.variables["LD_LIBRARY_PATH"] = (
        f"{place.parent}:{env.variables['LD_LIBRARY_PATH']}"
    )


def linked_packages(env):
    """As uv installs with --link-mode=symlink."""
    for place in (env.pip_copy, env.site / "torch/lib/libtorch_cuda.so"):
        stored = env.home / "cache" / place.name
        stored.parent.mkdir(exist_ok=True)
        place.rename(stored)
        place.symlink_to(stored)


def global_deps_need_it(env):
    needs = [env.parts.nccl["stock"], env.parts.cudart]
    link(env.site / "torch/lib/libtorch_global_deps.so", needs=needs)
    second_site(env)


UNUSED = "is mapped as well"
TORCHS = "preloaded by torch itself, from the first nvidia/nccl/lib on sys.path"


@pytest.mark.parametrize(
    ("prepare", "torch", "vllm", "mapped", "warned"),
    [
        (lambda env: None, "stock", "stock", 1, []),
        (library_path, "stock", "stock", 1, ["LD_LIBRARY_PATH leads to"]),
        (preload, "custom", "custom", 2, [UNUSED]),
        (
            so_path,
            "stock",
            "custom",
            2,
            ["two NCCLs in one process", "not the same bytes"],
        ),
        (so_path_is_missing, "stock", None, 1, ["vLLM takes none"]),
        (file_replaced, "custom", "custom", 1, []),
        (runpath_without_preload, "custom", "custom", 1, []),
        (second_site, "second site", "second site", 1, []),
        (
            library_path_of_another_cpu,
            "custom",
            "custom",
            1,
            ["LD_LIBRARY_PATH leads to"],
        ),
        (linked_packages, "stock", "stock", 1, []),
        (global_deps_need_it, "stock", "stock", 2, [UNUSED]),
    ],
)
def test_foretold_as_it_happens(prepare, torch, vllm, mapped, warned, env):
    prepare(env)
    happens = env.really()
    foretold, answer = env.foretold()
    assert foretold == happens
    expected = (VERSIONS[torch], VERSIONS[vllm] if vllm else None, mapped)
    assert (happens["torch"], happens["vllm"], len(happens["mapped"])) == expected
    said = "\n".join(answer["warnings"])
    assert not [words for words in warned if words not in said], said
    assert bool(said) == bool(warned), said


def test_the_system_s_copy(env, tmp_path):
    """In a mount namespace of its own, where ld.so.cache leads to a libnccl as a .deb's does."""
    folder = Path(env.put("third")).parent
    env.pip_copy.unlink()
    cache = tmp_path / "ld.so.cache"
    # The PATH of an ordinary user has no /usr/sbin.
    ldconfig = shutil.which("ldconfig") or "/usr/sbin/ldconfig"
    subprocess.run([ldconfig, "-C", cache, "-f", "/etc/ld.so.conf", folder], check=True)
    script = f'mount --bind {cache} /etc/ld.so.cache && exec "$@"'
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("mounting in a namespace is not permitted here")

    happens = env.really(inside)
    foretold, answer = env.foretold(inside)
    assert foretold == happens
    assert (happens["torch"], happens["vllm"]) == (VERSIONS["third"],) * 2
    assert answer["torch"]["why"] == "the system's ld.so.cache or folders"
    assert env.foretold()[0] == {"torch": None, "vllm": None, "mapped": []}


# Packages


def test_packages(env):
    """Unpacked as pip does, which lets two write one file."""
    packages, warnings = [], []
    for project, version in (
        ("nvidia-nccl-cu13", "2.30.7+gb10.abc"),
        ("nvidia-nccl-cu12", "2.28.9"),
    ):
        files = {"nvidia/nccl/lib/libnccl.so.2": env.parts.nccl["custom"].read_bytes()}
        wheel = write_wheel(env.home / "wheels", version, project=project, files=files)
        shutil.unpack_archive(wheel, env.site, "zip")
        packages = [f"{project} {version}", *packages]
        answer = env.foretold()[1]
        (copy,) = answer["copies"]
        assert [
            f"{owner['project']} {owner['version']}" for owner in copy["owners"]
        ] == packages
        warnings.append("\n".join(answer["warnings"]))
    assert copy["sha256"] == hashlib.sha256(env.pip_copy.read_bytes()).hexdigest()
    assert warnings[0] == ""
    assert f"{' and '.join(packages)}: uninstalling one deletes it for" in warnings[1]


def test_versions_of_torch_and_vllm_and_the_text(env, cli):
    for project, version in (("torch", "2.13.0"), ("vllm", "0.33.0")):
        about = f"Name: {project}\nVersion: {version}\n"
        write_files(env.site, {f"{project}-{version}.dist-info/METADATA": about})
    so_path(env)
    custom = env.variables["VLLM_NCCL_SO_PATH"]
    given = {"VLLM_NCCL_SO_PATH": custom}
    shown = cli("inspect", "--loaded", "--python", env.python, env=given).stdout
    assert shown.startswith(f"{env.python}: torch 2.13.0, vLLM 0.33.0\n")
    assert f"torch takes 2.29.7+cuda13.0 {env.pip_copy}: {TORCHS}" in shown
    assert f"vLLM  takes 2.30.7+cuda13.0 {custom}: VLLM_NCCL_SO_PATH names it" in shown
    assert f"\n{custom}\n  2.30.7+cuda13.0, no package, sha256 " in shown
    assert "warning two NCCLs in one process" in shown


# What cannot be answered


def test_no_answer(tmp_path, cli):
    venv.create(tmp_path / "venv", with_pip=False)
    said = cli(
        "inspect", "--loaded", "--python", tmp_path / "venv/bin/python", rc=9
    ).stderr
    assert "python: has no torch" in said
    assert "--python" in said
