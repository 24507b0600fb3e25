"""The Containerfile that patches an image: what stands in it, and what may not."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from patchkit.cluster.launch.install import layer_text
from patchkit.errors import UsageError
from patchkit.runtime.host.host import FlashInfer, Software

SITE = "/usr/local/lib/python3.12/dist-packages/vllm"
KERNELS = FlashInfer(version="", modules=(), facts={}, home="/opt/flashinfer")


def text(user="", vllm=SITE, kernels=None):
    found = Software(python="/usr/bin/python3", vllm_home=vllm, flashinfer=kernels)
    return layer_text(
        "localhost/patchkit:0123456789ab", found, user, ["--target", "gb10"]
    )


def test_the_layer_of_an_image():
    step = (
        "RUN --mount=type=bind,target=/patchkit,rw PYTHONPATH=/patchkit PYTHONDONTWRITEBYTECODE=1 "
        "PATCHKIT_CACHE_DIR=/patchkit/cache SOURCE_DATE_EPOCH=0 /usr/bin/python3 -m patchkit apply "
        f"--trust-source --target gb10 {SITE}\n"
    )
    assert text() == text("root") == f"FROM localhost/patchkit:0123456789ab\n{step}"
    assert (
        text("1000:1000")
        == f"FROM localhost/patchkit:0123456789ab\nUSER 0\n{step}USER 1000:1000\n"
    )


def test_the_layer_of_an_image_with_flashinfer():
    step = text().splitlines()[1]
    second = step.partition(",rw ")[2].replace(SITE, KERNELS.home)
    assert text(kernels=KERNELS).splitlines()[1] == f"{step} && {second}"
    assert text(kernels=replace(KERNELS, home="")) == text()


@example("$HOME", "a")
@example("a\nRUN x", "$(x)'\n")
@given(st.text(min_size=1), st.text(min_size=1))
def test_what_an_image_says_of_itself_never_leaves_its_place(user, folder):
    try:
        kernels = replace(KERNELS, home=folder)
        found = text(user, folder, kernels).splitlines()
    except UsageError:
        return
    assert [line.partition(" ")[0] for line in found if line] in (
        ["FROM", "RUN"],
        ["FROM", "USER", "RUN", "USER"],
    )
