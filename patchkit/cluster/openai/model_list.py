"""Ask a server which models it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from patchkit.cluster.openai.http_exchange import HttpAnswer, HttpServer

_MODELS = 64  # names that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A name that the server takes, and the longest text in tokens, None where it does not say."""

    name: str
    max_model_len: int | None = None


def list_models(server: HttpServer) -> tuple[HttpAnswer, tuple[ListedModel, ...]]:
    """Return how /v1/models answered, and the models that it named."""
    answer = server.ask("/v1/models")
    return answer, tuple(_read_models(server, answer.json))


def _read_models(server: HttpServer, said: object) -> Iterator[ListedModel]:
    listed = said.get("data") if isinstance(said, dict) else None
    for each in (listed if isinstance(listed, list) else [])[:_MODELS]:
        if isinstance(each, dict) and isinstance(name := each.get("id"), str):
            longest = each.get("max_model_len")
            known = type(longest) is int and 0 < longest < 1 << 40
            yield ListedModel(name=server.clean(name), max_model_len=longest if known else None)
