"""List the files of a commit, as the Hub says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit import process
from patchkit.cluster.models.choice import choose_files
from patchkit.cluster.models.expected import ModelRecord
from patchkit.cluster.models.names import Commit
from patchkit.durable.names import plain
from patchkit.errors import HostError, PatchkitError, SourceError, StorageError
from patchkit.quoting import quoted
from patchkit.records import RecordError, record

_SCRIPT = Path(__file__).with_name("hub_facts.py")
_PATIENCE = 60.0  # seconds
_PYTHON = "name the environment of vLLM: `venv` in cluster.toml, or --venv DIR"
_LOGIN = "log in there: `{hf} auth login`, or set HF_TOKEN there"
_SILENT = "no network there, or the Hub does not answer; or HF_HUB_OFFLINE is set there"
# The kind of error that huggingface_hub raises, ours, why, and what to do; the first one counts.
_REFUSALS: tuple[tuple[str, type[PatchkitError], str, str], ...] = (
    (
        "GatedRepoError",
        SourceError,
        "its owner asks for consent, and a login",
        f"agree at https://huggingface.co/{{repo}}, then {_LOGIN}",
    ),
    (
        "RevisionNotFoundError",
        SourceError,
        "it has no such branch, tag or commit",
        "leave the revision out, or look at https://huggingface.co/{repo}/commits/main",
    ),
    (
        "RepositoryNotFoundError",
        SourceError,
        "there is no such repository, or it is private and this user is not logged in",
        f"correct the name; or {_LOGIN}",
    ),
    (
        "ModuleNotFoundError",
        HostError,
        "the Python that was named has no huggingface_hub, which vLLM brings",
        _PYTHON,
    ),
    ("TransportError", StorageError, _SILENT, "look at the network there"),  # of httpx: no OSError
    ("OSError", StorageError, _SILENT, "look at the network there"),  # of requests as well
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A commit: each file with its size and digest."""

    commit: Commit
    files: Mapping[str, tuple[int | None, str | None]]

    def choose_record(self, repo: str) -> ModelRecord:
        """Return the files that vLLM loads. Raises SourceError for names that lead elsewhere."""
        try:
            for name in self.files:
                # It would be written outside of the model's folder, or not be seen.
                if not plain(name) or not name.isprintable():
                    raise RecordError(f"holds a file {name!r}, which is no plain name")
            files = {
                name: dict(zip(("size", "digest"), self.files[name], strict=True))
                for name in choose_files(self.files)
            }
            return record(ModelRecord, {"repo": repo, "commit": self.commit, "files": files})
        except RecordError as error:
            raise SourceError(
                f"{repo}: {error}",
                why="the repository holds what patchkit does not take for a model",
                hint=f"tell its owner: https://huggingface.co/{repo}/discussions",
            ) from None


def list_commit(python: str, repo: str, revision: str) -> Listing:
    """Ask the Hub, through the huggingface_hub of a Python."""
    program = Path(python).expanduser()
    code = _SCRIPT.read_text(encoding="utf-8")
    answer = process.ask(program, code, repo, revision, timeout=_PATIENCE, hint=_PYTHON)
    if not isinstance(answer, dict) or "kinds" not in answer:
        try:
            # JSON has no tuples, and a dataclass takes lists for them.
            return record(Listing, answer)
        except RecordError as error:
            raise HostError(
                f"{repo}: an odd answer of the Hub: {error}",
                hint=f"look at https://huggingface.co/{repo}",
            ) from None
    says, kinds = str(answer.get("says")).strip().partition("\n")[0], answer["kinds"]
    what = f"{repo}{revision and '@'}{revision}: {says}"
    hf = program.with_name("hf")
    for name, kind, why, hint in _REFUSALS:
        if isinstance(kinds, list) and name in kinds:
            raise kind(what, why=why, hint=hint.format(repo=repo, hf=quoted(hf)))
    raise HostError(what, hint=f"try by hand: `{quoted(hf, 'download', repo, 'config.json')}`")
