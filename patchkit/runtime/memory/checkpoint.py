"""Read a checkpoint: its config, its size, the names, types and shapes of its tensors."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchkit.errors import PatchkitError
from patchkit.foreign import whole_number
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.reading import read_bytes
from patchkit.records import RecordError, read_json
from patchkit.units import BYTES_PER_GIB

Config = Mapping[str, Any]
"""The values of a model's config.json, or of its part for text."""

PLAIN = ("BF16", "F16")
"""Types of 16 bits: a tensor of these types is not quantised."""

# Names that different models use in their configs and for their tensors.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "top_k_experts",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
)
_ASIDE = r"(?:^|\.)(?:mtp|visual|vision|audio|talker|code2wav)\w*\."
_LAYER = r"(?:^|\.)layers\.(\d+)\."
EMBEDDINGS = re.compile(
    r"(?:^|\.)(?:embed_tokens|tok_embeddings|embeddings|embed|wte)\."
)
_EXPERT = r"\.experts\.\d+\."
_FILE_COUNT = r"-of-0*(\d+)\."
_NO_CHECKPOINT = (
    PatchkitError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
)
_LONGEST_HEADERS = 10**8  # bytes, of all files: the limit of safetensors for one


@frozen
class Tensor:
    """A tensor, or that of all experts of a layer, named ``experts.*``. ``size`` is in bytes.

    ``layer`` is None if it is outside the numbered layers. ``aside`` says that it is not read for
    every token: it is for drafting, images or audio.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    layer: int | None
    aside: bool = False


@frozen
class Checkpoint:
    """The config and the tensors of a checkpoint.

    ``architectures`` are the classes of the model. In ``config``, the values of ``text_config``
    have replaced those of the whole. ``aside`` are the tensors that are not read for every token.
    ``reads`` are the bytes of weights that are read for a token, ``largest_file`` those of the
    largest file.
    """

    architectures: Texts
    config: Config
    tensors: tuple[Tensor, ...]
    aside: tuple[Tensor, ...]
    reads: float
    largest_file: int = 0

    @property
    def has_plain_head(self) -> bool:
        """Return whether the output head is in 16 bits and no drafting part has its own head."""
        if any("head." in tensor.name for tensor in self.aside):
            return False

        heads = [tensor for tensor in self.tensors if "head." in tensor.name]
        if not heads:
            heads = [row for row in self.tensors if EMBEDDINGS.search(row.name)]

        return len(heads) == 1 and heads[0].dtype in PLAIN


def find_checkpoint(model: str, environment: Values) -> Checkpoint | None:
    """Return the checkpoint that ``model`` names: a folder, or a download of a repository.

    If there are several, return the one with the most bytes read for a token. Return None if none
    can be read.
    """
    checkpoints = filter(
        None, map(folder_checkpoint, model_folders(model, environment))
    )
    return max(checkpoints, key=lambda checkpoint: checkpoint.reads, default=None)


def folder_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder, None if it cannot be used."""
    with contextlib.suppress(*_NO_CHECKPOINT):
        return _read_checkpoint(folder)
    return None


def _read_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint in a folder. Raises one of ``_NO_CHECKPOINT`` if it cannot be used."""
    config = read_json(Fields, read_bytes(folder / "config.json"))
    # text_config may name other architectures, but those of the whole model count.
    names = config.get("architectures") or ()
    config |= config.get("text_config", {})
    # Nested parts are about images, audio and quantization; the tensors tell what is needed.
    config = {
        key: value for key, value in config.items() if not isinstance(value, dict)
    }

    layers = int(config["num_hidden_layers"])
    by_name: dict[str, Tensor] = {}
    for name, header in _read_headers(folder).items():
        tensor = _read_tensor(name, header, layers)
        former = by_name.get(tensor.name)
        size = tensor.size + (former.size if former else 0)
        by_name[tensor.name] = replace(tensor, size=size)

    tensors = [tensor for tensor in by_name.values() if not tensor.aside]
    return Checkpoint(
        architectures=tuple(name for name in names if isinstance(name, str)),
        config=config,
        tensors=tuple(tensors),
        aside=tuple(tensor for tensor in by_name.values() if tensor.aside),
        reads=_count_reads(config, tensors),
        largest_file=max(path.stat().st_size for path in _weight_files(folder)),
    )


def _read_tensor(name: str, header: Fields, layers: int) -> Tensor:
    """Return a tensor by its safetensors header; ``layers`` is the number of numbered layers.

    Layers beyond are for drafting. Image and audio parts work on prompts, not on each token.
    """
    begin, end = map(whole_number, header["data_offsets"])
    number = re.search(_LAYER, name)
    layer = int(number[1]) if number else None
    is_beyond = layer is not None and layer >= layers

    return Tensor(
        name=re.sub(_EXPERT, ".experts.*.", name),
        dtype=str(header.get("dtype")),
        shape=tuple(map(int, header.get("shape", ()))),
        size=whole_number(end - begin),
        layer=layer,
        aside=is_beyond or bool(re.search(_ASIDE, name)),
    )


def read_count(config: Config, key: str) -> int:
    """Return a whole number from a config, 0 if the key is missing or has another value."""
    try:
        return whole_number(config.get(key))
    except ValueError:
        return 0


def _read_headers(folder: Path) -> Fields:
    """Return tensor → its safetensors header: type, shape and offsets.

    Raises ValueError if there are not as many files as their names say (``00001-of-00004``), or if
    a header is no JSON, or they are too long.
    """
    paths = _weight_files(folder)
    headers: Fields = {}
    rest = _LONGEST_HEADERS
    for path in paths:
        count = re.search(_FILE_COUNT, path.name)
        if count and int(count[1]) != len(paths):
            raise ValueError("a file is still to be downloaded")

        tensors, start = read_header(path, rest)
        rest -= start
        headers |= tensors

    return headers


def read_header(path: Path, limit: int = _LONGEST_HEADERS) -> tuple[Fields, int]:
    """Return tensor → its header in a file of safetensors, and where the first tensor begins.

    Raises OSError, and RecordError if the headers are no JSON object or longer than ``limit``.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > limit:
            raise RecordError("the headers are too long")
        tensors = read_json(Fields, file.read(length))

    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def head_size(config: Config) -> int:
    """Return the numbers of an attention head, 0 if the config does not tell it."""
    size = read_count(config, "head_dim")
    heads = read_count(config, "num_attention_heads")
    if not size and heads:
        size = read_count(config, "hidden_size") // heads
    return size


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder, and no FIFO or device.

    All files count only if none is called model*: some repositories have the same weights again as
    consolidated.safetensors.
    """
    files = list(filter(Path.is_file, folder.glob("*.safetensors")))
    return [file for file in files if file.name.startswith("model")] or files


def _count_reads(config: Config, tensors: Sequence[Tensor]) -> float:
    """Return the bytes of weights that are read for a token: all, but only the chosen experts."""
    experts = max(config.get(key) or 0 for key in _EXPERTS)
    experts_per_token = max(config.get(key) or 0 for key in EXPERTS_PER_TOKEN)

    # A model without a head uses its embeddings as the head.
    is_tied = not any("head." in tensor.name for tensor in tensors)

    reads = 0.0
    for tensor in tensors:
        if ".experts." in tensor.name:
            reads += tensor.size * (experts_per_token / experts)
        elif is_tied or not EMBEDDINGS.search(tensor.name):
            reads += tensor.size

    return reads


def download_folder(model: str, environment: Values) -> Path:
    """Return the folder into which huggingface_hub downloads a model. It need not exist."""
    user_cache = f"{environment.get('HOME', '')}/.cache/huggingface"
    home = environment.get("HF_HOME") or user_cache
    cache = environment.get("HF_HUB_CACHE") or f"{home}/hub"

    return Path(cache, "models--" + model.replace("/", "--"))


def model_folders(model: str, environment: Values) -> Iterator[Path]:
    """Yield the folder that ``model`` names, and the snapshots of its downloads."""
    yield Path(model)
    yield from download_folder(model, environment).glob("snapshots/*")


def weights_gib(model: str, environment: Values) -> float | None:
    """Return the GiB of weights in a model's folder or largest snapshot, None if there are none.

    Only files named ``*.safetensors`` count, and no link to a blob that is not downloaded yet.
    """
    sizes = [
        sum(file.stat().st_size for file in _weight_files(folder))
        for folder in model_folders(model, environment)
    ]
    return max(sizes) / BYTES_PER_GIB or None
