"""Small valid wheels, made by the standard library."""

import base64
import hashlib
import json
import platform
import zipfile

from patchkit.wheel.device.inspect import inspect_wheel
from patchkit.wheel.file.wheelfile import WheelFile

CPU = platform.machine()
OTHER_CPU = "aarch64" if CPU != "aarch64" else "x86_64"
HERE, ELSEWHERE = (f"py3-none-manylinux_2_17_{cpu}" for cpu in (CPU, OTHER_CPU))

_FILES = {"nvidia-nccl-cu13": "nvidia/nccl/lib/libnccl.so.2"}


def inspected_wheel(path):
    """Return the libraries and programs of a wheel, with their device code."""
    with WheelFile(path) as wheel:
        return inspect_wheel(wheel)


def write_wheel(
    folder,
    version,
    *,
    project="nvidia-nccl-cu13",
    tag=HERE,
    files=None,
    requires=(),
    python="",
    facts=None,
    change=None,
):
    """Write a wheel into a folder; ``change`` may spoil its members, RECORD among them."""
    stem = f"{project.replace('-', '_')}-{version}"
    home = f"{stem}.dist-info"
    named = [f"Name: {project}", f"Version: {version}"]
    named += [f"Requires-Python: {python}"] if python else []
    named += [f"Requires-Dist: {each}" for each in requires]
    members = {
        **(
            files
            or {_FILES.get(project, f"{project}.txt"): f"{version} {tag}".encode()}
        ),
        f"{home}/METADATA": "\n".join(["Metadata-Version: 2.1", *named, ""]).encode(),
        f"{home}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    if facts is not None:
        members[f"{home}/patchkit.json"] = json.dumps(facts).encode()
    members[f"{home}/RECORD"] = record(home, members)
    if change:
        change(members, home)
    folder.mkdir(parents=True, exist_ok=True)
    return write_zip(folder / f"{stem}-{tag}.whl", members)


def write_zip(place, members, method=zipfile.ZIP_STORED, level=None):
    """Write an archive of these members, without dates; return its path."""
    with zipfile.ZipFile(place, "w") as archive:
        for path, data in members.items():
            archive.writestr(zipfile.ZipInfo(path), data, method, level)
    return place


def record(home, members):
    rows = []
    for path, data in members.items():
        digest = (
            base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            .rstrip(b"=")
            .decode()
        )
        quoted = f'"{path}"' if "," in path else path
        rows.append(f"{quoted},sha256={digest},{len(data)}")
    return "\n".join([*rows, f"{home}/RECORD,,", ""]).encode()
