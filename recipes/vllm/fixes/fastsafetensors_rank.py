"""The fastsafetensors loader, on nodes that have one device each."""

from functools import partial
from types import SimpleNamespace

from patchkit.recipes.vllm import kit

_PATH = "vllm/model_executor/model_loader/weight_utils.py"
_SCOPE = "fastsafetensors_weights_iterator"
_UPSTREAM = """\
device = torch.device(f"cuda:{current_platform.current_device()}")
    hf_weights_files = sorted(hf_weights_files, key=_natural_sort_key)
"""
_BEFORE = 'device = torch.device(f"cuda:{pg.rank()}")'
_AFTER = """\
# A rank is no device index: every node of a cluster has a cuda:0. All ranks must deal the files
# out in the same order, which the folders of two nodes do not promise.
device = torch.device(f"cuda:{current_platform.current_device()}")
hf_weights_files = sorted(hf_weights_files, key=os.path.basename)
"""
_FILES = ["/a/2", "/a/1", "/a/3"]


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look which device the loader copies to, and whether it sorts the files."""
    text = tree.read(_PATH)
    if _UPSTREAM in text:
        return kit.upstream(f"{_PATH}: {_SCOPE} copies to the current device")

    edits = kit.swap(_PATH, text, _SCOPE, _BEFORE, _AFTER, note="the node's own device")
    return kit.found(
        edits,
        now=f"{_PATH}: {_SCOPE} copies to the device that has the rank's number",
        done=f"{_PATH}: {_SCOPE} copies to the current device",
    )


def prove(case: kit.Case) -> str:
    """Run two nodes with one device each, whose folders list the files in different orders."""
    # rank, its device, what the folder lists: two nodes, and the second rank of one host
    ranks = [(0, 0, _FILES), (1, 0, sorted(_FILES)), (1, 1, _FILES)]
    runs = kit.ask(
        case.patched, [partial(_loaded, case.patched, *rank) for rank in ranks], object
    )

    expected = [["/a/1", "/a/2"], ["/a/3"]]
    for (_rank, device, _files), rounds in zip(ranks, runs, strict=True):
        if rounds != [[f"cuda:{device}", files] for files in expected]:
            raise kit.ProofError(
                f"{_SCOPE} loads {rounds}, expected {expected} on cuda:{device}",
                why="the function was edited by hand, or upstream rewrote it",
            )
    return f"{_SCOPE}: two nodes load the same files, each to its own cuda:0"


def _loaded(
    tree: kit.SourceTree, rank: int, device: int, files: list[str]
) -> list[object]:
    """Return what a rank of two hands to its loader: (device, files) for each round."""
    rounds: list[object] = []
    group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)

    def loader(_group: object, device: str, files: list[str], *, nogds: bool) -> object:
        rounds.append((device, tuple(files)))
        buffer = SimpleNamespace(key_to_rank_lidx={}, close=kit.Anything())
        return SimpleNamespace(
            copy_files_to_device=lambda: buffer, close=kit.Anything()
        )

    names = {
        "logger": kit.Anything("logger"),
        "torch": SimpleNamespace(
            distributed=SimpleNamespace(
                is_initialized=lambda: True, group=SimpleNamespace(WORLD=group)
            ),
            device=str,
        ),
        "current_platform": SimpleNamespace(current_device=lambda: device),
        "tqdm": lambda rounds, **_options: rounds,
        "enable_tqdm": bool,
        "_BAR_FORMAT": "",
        "_init_loader": loader,
    }
    code = kit.Code(tree, names)
    assert list(code.get(_PATH, _SCOPE)(files, False)) == []
    return rounds


FIX = kit.Fix(
    title="fastsafetensors loads to the node's own device, in one order on all nodes",
    symptom='"invalid device ordinal" on the second node with --load-format fastsafetensors.',
    why="The loader takes the rank for a device index, and the second of two Sparks has no cuda:1. "
    "It also deals the files out in the order in which a node's folder lists them, and every rank "
    "has to deal alike.",
    needs=(
        kit.recommended(
            ">=0.11.1,<0.17",
            "--load-format fastsafetensors fails on every node but the first",
        ),
    ),
    upstream="0.17.0 takes the current device and sorts the files",
    look=look,
    prove=prove,
    majors=(11, 12),  # any node with one device, a Jetson Thor too
    examples=(
        kit.Example(
            "0.16.0",
            _PATH,
            f"def {_SCOPE}(hf_weights_files):\n    {_BEFORE}\n    return device\n",
            f"def {_SCOPE}(hf_weights_files):\n"
            + "".join(f"    {line}\n" for line in _AFTER.splitlines())
            + "    return device\n",
        ),
    ),
)
