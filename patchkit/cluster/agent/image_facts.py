"""Look at an engine and an image on a node: what containers get and contain. Runs on the node.

Sources are `docker info` or `podman info`, `image inspect`, and the specifications of the Container
Device Interface (CDI) that `nvidia-ctk cdi generate` writes. The image's own Python lists its
content: patchkit is sent into a container of it, just as it is sent to a node.
"""

import json
import os
import pwd
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from patchkit.cluster.agent.health import DiskRoom, disk_rooms
from patchkit.cluster.agent.node_files import run_for_user
from patchkit.cluster.ssh.node import Remote
from patchkit.digests import digest
from patchkit.errors import HostError
from patchkit.foreign import read_json, whole_number
from patchkit.frozen import Fields, Texts, frozen
from patchkit.process import ask, attempt
from patchkit.records import RECIPES, matching, read_toml
from patchkit.runtime.host.host import Software
from patchkit.runtime.host.probe import LIVE
from patchkit.runtime.host.software import find_ptxas, read_software


@frozen
class Engine:
    """What patchkit tells a container engine; recipes/units/engines.toml explains the keys."""

    run: Texts
    remove: Texts
    layer: Texts
    copies: int


ENGINES = read_toml(dict[str, Engine], RECIPES / "units/engines.toml")
LAYER = "io.patchkit.layer"
"""The label of a patched image; its value is a digest of the patchkit and the options used."""

# A name of an image that is a digest, or ends in one.
_BY_DIGEST = re.compile("(?:^|sha256:)[0-9a-f]{64}$")
_ID = re.compile("(?:sha256:)?[0-9a-f]{64}")
# Entry points that are vLLM, Python or a shell; any other runs its arguments as a command.
_PROGRAM = re.compile(
    r"(?:^|[/ ])(?:vllm|python[\d.]*|(?:ba|da|z)?sh)(?: |$)|vllm\.entrypoints"
)
_ROOTLESS = "name=rootless"  # of docker's daemon
_PATIENCE = 30.0  # seconds for an engine to answer
_ODD = (OSError, ValueError, LookupError, TypeError, AttributeError)
_FOLDERS = ("/etc/cdi", "/var/run/cdi")  # the last one counts: CDI, pkg/cdi/doc.go
_GPU = re.compile(r'\bkind"?: *"?nvidia\.com/gpu\b')
_ALL = re.compile(r'\bname"?: *"?all\b')
_HOOK = "nvidia-container-runtime-hook"
_DRIVER = re.compile(r"/libcuda\.so\.(\d+\.[\d.]*\d)")
# Variables of images of nvidia/cuda and NGC.
_CUDA = ("CUDA_VERSION", "NV_CUDA_LIB_VERSION", "NVIDIA_REQUIRE_CUDA")
_GLIBC = r"(2\.(1[7-9]|[2-9]\d))?"
_NOWHERE = DiskRoom(
    folder="/",
    free=0,
    total=0,
    files=None,
)
_PYTHON_CODE = """
import platform, sys
answer = {"release": "%d.%d" % sys.version_info[:2], "machine": platform.machine()}
answer["glibc"] = platform.libc_ver()[1]
"""


@frozen
class ImageContents:
    """The content of an image; ``release`` is that of its Python, such as "3.12".

    ``ptxas`` is the path of CUDA 13's, "" for none.
    """

    software: Software | None = None
    ptxas: str = ""
    release: Annotated[str, matching(r"(3\.\d{2})?", "a release of Python")] = ""
    machine: Annotated[str, matching("(aarch64|x86_64)?", "a CPU")] = ""
    glibc: Annotated[str, matching(_GLIBC, "a glibc, 2.17 or later")] = ""


@frozen
class ImageFacts:
    """The facts of an engine and of an image.

    ``problem`` is the id of a finding in survey.toml, "" for none; ``said`` are the engine's words
    about it. ``program`` is the path of the engine, "" for none; ``user`` is UID:GID of the user
    who runs containers, ``login`` the name. ``version`` is "" for an engine that does not answer,
    ``storage`` is the disk of its images. ``spec`` is the path of the CDI specification with all
    GPUs, "" for none; ``driver`` is the release of the libraries that the specification names.
    ``hook`` says that docker has NVIDIA's hook for --gpus. ``infiniband`` says that there are RDMA
    devices; ``closed`` are those that this user may open only by a group, or not at all.

    ``id`` is "" for an image that does not exist. ``content`` is a digest over the layers and the
    configuration: unlike the id, it is the same in each kind of store. ``wraps`` says that the
    entry point runs its arguments as a command, ``by_tag`` that the image was found by its tag
    alone, not by its id or a digest. ``digests`` are the image's names in registries, ``size`` is
    in bytes, ``owner`` is the default user, ``layer`` the value of the label ``LAYER``. The image
    is made for the CPU ``cpu`` and the CUDA release ``cuda``, such as "13.0".
    """

    program: Annotated[str, matching(r"(/.*/(docker|podman))?", "an engine")] = ""
    user: str = ""
    login: str = ""
    version: str = ""
    storage: DiskRoom = _NOWHERE
    spec: str = ""
    driver: str = ""
    hook: bool = False
    infiniband: bool = False
    closed: Texts = ()
    id: Annotated[str, matching("((sha256:)?[0-9a-f]{64})?", "an id")] = ""
    content: str = ""
    by_tag: bool = False
    wraps: bool = False
    digests: Texts = ()
    size: int = 0
    owner: str = ""
    layer: str = ""
    cpu: str = ""
    cuda: str = ""
    contents: ImageContents = ImageContents()
    problem: str = ""
    said: str = ""

    @property
    def digits(self) -> str:
        """Return the hex digits of the id: all engines take an id in this form."""
        return self.id.removeprefix("sha256:")

    @property
    def run(self) -> Texts:
        """Return the words that run a container, up to the options that a caller adds."""
        options = ENGINES[Path(self.program).name].run
        words = (option.format(user=self.user) for option in options)
        return (self.program, *words, "--rm", "--pull=never", "--log-driver=none")

    @property
    def remove(self) -> Texts:
        """Return the words that end containers, up to the containers' names."""
        return (self.program, *ENGINES[Path(self.program).name].remove)


def look_at_image(engine: str, names: Sequence[str]) -> ImageFacts:
    """Return the facts of ``find_image``, with the content that the image's own Python lists.

    The content is read in a container. If that fails, the problem is "image-silent".
    """
    image = find_image(engine, names)
    if image.problem:
        return image

    options = ["--interactive", "--network=none"]
    if not image.wraps:
        options.append("--entrypoint=")
    shell = (*image.run, *options, image.id, "sh", "-c")

    try:
        contents = Remote("the image", way=shell).call(ImageContents, contents_inside)
    except HostError as error:
        return replace(
            image,
            problem="image-silent",
            said=error.what,
        )
    return replace(image, contents=contents)


def find_image(
    engine: str,
    names: Sequence[str],
    root: str = "/",
) -> ImageFacts:
    """Return the facts of an engine, and of the first image that exists of ``names``.

    ``root`` is the folder of the machine's files. What fails is the ``problem`` of the facts:
    nothing is raised for it.
    """
    program = find_program(engine)
    if not program:
        return ImageFacts(problem="engine-missing")

    user = user_entry()
    facts = ImageFacts(
        program=program,
        user=f"{user.pw_uid}:{user.pw_gid}",
        login=user.pw_name,
    )

    try:
        # Ask as a unit would: this login may be in a group that the user's systemd is not in.
        options = ("--quiet", "--pipe", "--wait", "--collect")
        words = (*options, program, "info", "--format={{json .}}")
        done = run_for_user("systemd-run", *words, timeout=_PATIENCE)
        if done.trouble:
            raise HostError(done.last_line())

        info = read_json(done.output)
        if refusals := info.get("ServerErrors"):  # docker ends with 0 all the same
            raise HostError(str(refusals[0]))
        if _ROOTLESS in info.get("SecurityOptions", ()):
            raise HostError("docker is rootless")

        podman = find_program("podman")
        if podman and "host" in info:
            # `docker` may be another name of podman.
            facts = replace(facts, program=podman)
        facts = replace(facts, **_read_info(info, root), **_read_devices(root))
        return replace(facts, **_inspect_image(facts.program, names))
    except HostError as error:
        refusal = error.what
    except _ODD as error:
        refusal = f"{engine}: an answer that cannot be read: {error}"
    return replace(facts, problem="engine-refuses", said=refusal)


def find_program(name: str) -> str | None:
    """Return the path of a program; what PATH lacks may be in /usr/bin or /bin."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/bin"
    return shutil.which(name, path=path)


def user_entry() -> pwd.struct_passwd:
    """Return this user's entry; without one, as in a container, the number is the name."""
    number = os.getuid()

    try:
        return pwd.getpwuid(number)
    except KeyError:
        return pwd.struct_passwd((str(number), "", number, os.getgid(), "", "/", ""))


def _read_info(info: Any, root: str) -> Fields:
    """Return the fields of ImageFacts from an engine's `info` and from CDI specifications."""
    if "host" in info:
        version = info["version"]["Version"]
        storage = info["store"]["graphRoot"]
        folders: Sequence[str] = _FOLDERS
    else:
        version = info["ServerVersion"]
        storage = info["DockerRootDir"]
        folders = info.get("CDISpecDirs") or ()

    spec = ""
    driver = ""
    for folder in folders:
        for file, text in _gpu_specifications(Path(root + folder)):
            release = _DRIVER.search(text)
            spec = f"/{file.relative_to(root)}"
            driver = release[1] if release else ""

    return {
        "version": str(version),
        "storage": next(disk_rooms([storage])),
        "spec": spec,
        "driver": driver,
        "hook": "nvidia" in info.get("Runtimes", ()) or bool(find_program(_HOOK)),
    }


def _gpu_specifications(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the CDI specifications in a folder that have a device for all GPUs, with their text."""
    for file in sorted(folder.glob("*")):
        with suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            is_read = file.suffix in (".yaml", ".json")
            if is_read and _GPU.search(text) and _ALL.search(text):
                yield file, text


def _read_devices(root: str) -> Fields:
    """Return the fields of ImageFacts about RDMA devices."""
    folder = Path(root, "dev/infiniband")
    closed = []
    for file in sorted(folder.glob("uverbs*")):
        status = file.stat()
        # 6: others may read and write.
        is_open = status.st_mode & 6 == 6 or status.st_uid == os.getuid()
        if not is_open:
            closed.append(str(file))

    return {"infiniband": folder.is_dir(), "closed": tuple(closed)}


def _inspect_image(program: str, names: Sequence[str]) -> Fields:
    """Return the fields of ImageFacts about the first image that exists of ``names``."""
    for name in names:
        done = attempt(program, "image", "inspect", "--", name, timeout=_PATIENCE)
        if not done.trouble:
            (answer,) = read_json(done.output)
            return {**_image_fields(answer), "by_tag": not _BY_DIGEST.search(name)}
    return {"problem": "image-missing"}


def _image_fields(image: Any) -> Fields:
    """Return the fields of ImageFacts from an engine's description of an image.

    Raises ValueError for an odd id, and LookupError, TypeError or AttributeError for another form.
    """
    if not _ID.fullmatch(image["Id"]):
        raise ValueError(image["Id"])

    config = image["Config"]
    cpu = str(image["Architecture"])
    keys = ("Entrypoint", "Cmd", "Env", "User", "WorkingDir")
    settings = [config.get(key) or "" for key in keys]
    content = json.dumps([cpu, image["RootFS"]["Layers"], *settings])
    entry = " ".join(config.get("Entrypoint") or ())
    labels = config.get("Labels") or {}

    return {
        "id": image["Id"],
        "content": digest(content),
        "wraps": bool(entry) and not _PROGRAM.search(entry),
        "digests": tuple(map(str, image.get("RepoDigests") or ())),
        "size": whole_number(image.get("Size", 0)),
        "owner": str(config.get("User") or ""),
        "layer": str(labels.get(LAYER, "")),
        "cpu": cpu,
        "cuda": _cuda_release(config.get("Env") or ()),
    }


def _cuda_release(environment: Sequence[str]) -> str:
    """Return the release of CUDA that an image's variables name, such as "13.0", "" for none."""
    variables = dict(pair.partition("=")[::2] for pair in environment)
    for name in _CUDA:
        if release := re.search(r"\d+\.\d+", variables.get(name, "")):
            return release[0]
    return ""


def contents_inside() -> ImageContents:
    """Return the content of the image in whose container this runs. Raises HostError."""
    installed = read_software(None, os.environ)
    ptxas = find_ptxas(LIVE, os.environ)
    answer = ask(installed.python, _PYTHON_CODE)
    return ImageContents(
        software=installed,
        ptxas=ptxas,
        **answer,
    )
