"""A Containerfile for a wheelhouse: its text, what it refuses, and how it is run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.errors import SourceError, UsageError
from patchkit.runtime.rules.variable_rules import cache_variables
from patchkit.wheel.file.wheelfile import WheelName
from patchkit.wheel.wheelhouse.containerfile import (
    CACHE_HOME,
    build_commands,
    check_image,
    containerfile,
)
from patchkit.wheel.wheelhouse.storage import Kind, Manifest, ManifestEntry

GOLDEN = Path(__file__).parents[3] / "data" / "image" / "Containerfile"
BASE = "docker.io/library/ubuntu:24.04@sha256:" + "0" * 64
NODE = {"python": "3.12", "machine": "aarch64", "glibc": "2.39"}
WHEELS = (
    ("vllm-0.25.1+gb10.1-cp38-abi3-manylinux_2_34_aarch64.whl", Kind.BUILT, {}),
    (
        "nvidia_nccl_cu13-2.29.7+gb10.1-py3-none-manylinux_2_35_aarch64.whl",
        Kind.BUILT,
        {},
    ),
    ("torch-2.11.0-cp312-cp312-manylinux_2_28_aarch64.whl", Kind.DEPENDENCY, NODE),
)


def made(*wheels, folder="wheelhouse"):
    entries = [
        ManifestEntry(
            name=WheelName(name), sha256="0" * 64, size=1, facts=facts, kind=kind
        )
        for name, kind, facts in wheels
    ]
    manifest = Manifest(wheels=tuple(entries))
    caches = cache_variables(CACHE_HOME, manifest.version_of("vllm"))
    return containerfile(manifest, BASE, folder, caches)


def test_the_file_for_a_wheelhouse():
    found = made(*WHEELS)
    assert (found.text, found.platform) == (GOLDEN.read_text(), "linux/arm64")


@pytest.mark.parametrize(
    ("wheels", "what"),
    [
        (WHEELS[:2], "is not filled for one machine"),
        ((*WHEELS[:2], (WHEELS[2][0], Kind.LOCKED, NODE)), "only locks 1 wheels"),
        (
            (
                WHEELS[0],
                (WHEELS[2][0], Kind.DEPENDENCY, {**NODE, "python": "3\nRUN x"}),
            ),
            "CPython",
        ),
        (
            (WHEELS[0], (WHEELS[2][0], Kind.DEPENDENCY, {**NODE, "machine": "riscv"})),
            "riscv",
        ),
    ],
)
def test_wheelhouses_that_make_no_image(wheels, what):
    with pytest.raises(SourceError, match=what):
        made(*wheels)


@given(st.text(min_size=1, max_size=40))
def test_what_a_user_names_never_leaves_its_place(text):
    before = made(*WHEELS).text.splitlines()
    try:
        lines = made(*WHEELS, folder=text).text.splitlines()
    except UsageError:
        return
    changed = [line for line, other in zip(lines, before, strict=True) if line != other]
    assert changed in (
        [],
        [f"RUN --mount=type=bind,source={text},target=/wheelhouse \\"],
    )


def test_an_image_is_named_by_its_digest():
    check_image("localhost:5000/a/b:1.0@sha256:" + "0" * 64, pinned=True)
    check_image("ubuntu:24.04", pinned=False)
    with pytest.raises(UsageError, match="names no digest"):
        check_image("ubuntu:24.04", pinned=True)
    for image in ("a\nRUN x", "--platform=x y", "$(id)"):
        with pytest.raises(UsageError, match="is not the name of an image"):
            check_image(image, pinned=False)


def test_each_builder_has_a_line():
    commands = build_commands("linux/arm64")
    assert [words[0] for words in commands] == ["docker", "podman", "buildah"]
    assert all("linux/arm64" in words and words[-1] == "." for words in commands)
