"""Talk to a server of the OpenAI API: `patchkit chat`."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from patchkit.cli.cluster.cluster_options import cluster_here
from patchkit.cli.next_step import error_text
from patchkit.cli.out import as_json, ask_line, flow, print_json, say, style, tell
from patchkit.cluster.agent import node_files
from patchkit.cluster.openai.answer_stream import AnswerStream, StreamedAnswer, StreamPiece
from patchkit.cluster.openai.api_key import key_for
from patchkit.cluster.openai.conversation import Conversation, explain_no_answer
from patchkit.cluster.openai.http_exchange import HttpServer, list_models, server_at
from patchkit.doctor.peers.placed_files import placed_files, url_of
from patchkit.durable.signals import Interrupted
from patchkit.errors import PatchkitError, UsageError
from patchkit.quoting import quoted
from patchkit.reading import read_stdin, read_text

_BODY = quoted("patchkit", "chat", "--body", '{"top_p": 0.9}')
_USUAL_ENDS = ("", "stop", "tool_calls")  # of an answer that is whole


@click.command()
@click.argument("question", required=False)
@click.option("--url", metavar="URL", help="The server; default: what runs on this machine.")
@click.option("--model", metavar="NAME", help="Default: the first that the server names.")
@click.option("--system", metavar="TEXT", help="What the model is told beforehand.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), metavar="N", help="For reasoning and answer."
)
@click.option(
    "--temperature", type=click.FloatRange(0, 2), metavar="T", help="Default: the server's."
)
@click.option("--think/--no-think", default=None, help="Where the chat template takes that.")
@click.option("--body", metavar="JSON", help="More fields of the request, or @FILE: tools, top_p …")
@click.option("--key-env", metavar="NAME", help="The variable that holds the server's key.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Of silence.",
)
@as_json
def command(
    *,
    question: str | None,
    url: str | None,
    model: str | None,
    system: str | None,
    body: str | None,
    key_env: str | None,
    timeout: float,
    as_json: bool,
    **choices: Any,
) -> None:
    """Talk to a server, and see what it thinks apart from what it says.

    Without QUESTION it reads questions in the terminal: Ctrl-C ends an answer, Ctrl-D the talk.
    The answer goes to standard output, its reasoning, calls of tools and counts beside it.

    \b
      patchkit chat
      patchkit chat "What is six times seven?"
      git diff | patchkit chat --system "Review this." - > review.txt
    """
    asked = read_stdin() if question == "-" else question
    if asked is None and not sys.stdin.isatty():
        raise UsageError("there is no question", hint="… | patchkit chat -")
    if asked is not None and not asked.strip():
        raise UsageError("the question is empty", hint='patchkit chat "What is six times seven?"')
    more = _fields_of(body) if body else {}
    bare = server_at(url or _own_url())
    server = replace(bare, key=key_for(bare.url, key_env or ""))
    talk = Conversation(
        server=server,
        fields={"model": model or _first_model(server)} | _request_fields(**choices) | more,
        silence=timeout,
        messages=[{"role": "system", "content": system}] if system else [],
    )
    if asked is None:
        _interactive(talk, as_json=as_json)
    else:
        _turn(talk, asked, as_json=as_json)


def _fields_of(body: str) -> dict[str, Any]:
    text = read_text(Path(body[1:])) if body.startswith("@") else body
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise UsageError("--body: is no JSON object", hint=_BODY)


def _request_fields(think: bool | None, **choices: Any) -> dict[str, Any]:
    """Return the fields of a request that were asked for; the others are left to the server.

    ``think`` goes by both names that chat templates have for it; a template ignores the other one.
    """
    # enable_thinking: Qwen3, Gemma 4, Granite 4.2; thinking: DeepSeek-V3.1, Granite 3.2, Holo2
    # (vLLM 0.33.0, docs/features/reasoning_outputs.md).
    if think is not None:
        choices["chat_template_kwargs"] = {"enable_thinking": think, "thinking": think}
    return {name: value for name, value in choices.items() if value is not None}


def _own_url() -> str:
    """Return where the server of this machine listens: as `up` placed it, else by default."""
    own = cluster_here().file
    files = node_files.read_placed(node_files.config_folder(own.name))
    return url_of(placed_files(files, own.unit), own.serve.port)


def _first_model(server: HttpServer) -> str:
    listing, models = list_models(server)
    if not models:
        empty = listing.trouble or "no model" * (listing.status == 200)
        answer = StreamedAnswer(path="/v1/models", status=listing.status, trouble=empty)
        if found := explain_no_answer(server, "", answer, ()):
            raise found.error()
    return models[0].name


def _interactive(talk: Conversation, *, as_json: bool) -> None:
    """Answer line by line, until the input ends; what goes wrong ends an answer alone."""
    tell(f"{talk.fields['model']} at {talk.server.url}; Ctrl-C ends an answer, Ctrl-D the talk")
    while True:
        try:
            if (question := ask_line("> ")) is None:
                break
            if question.strip():
                _turn(talk, question, as_json=as_json)
        except Interrupted as interrupt:
            if interrupt.exit_code != 128 + signal.SIGINT:
                raise
            tell("")
        except PatchkitError as error:
            say(error_text(error), err=True)
    tell("")


def _turn(talk: Conversation, question: str, *, as_json: bool) -> None:
    """Ask, show the answer as it comes, and keep what came. Raises HostError for no answer."""
    stream = talk.ask(question)
    try:
        (_as_lines if as_json else _on_screen)(stream)
    finally:
        talk.keep(question, stream.answer())
    answer, model = stream.answer(), str(talk.fields["model"])
    models = list_models(talk.server)[1] if answer.status >= 400 else ()
    if found := explain_no_answer(talk.server, model, answer, [one.name for one in models]):
        raise found.error()


def _as_lines(stream: AnswerStream) -> None:
    """Print a line of JSON for each piece, each call and the end."""
    with contextlib.closing(stream.pieces()) as pieces:
        for piece in pieces:
            print_json(asdict(piece), indent=None)
    answer = stream.answer()
    for call in answer.tool_calls:
        print_json({"kind": "tool_call", **asdict(call)}, indent=None)
    if answer.status == 200:
        print_json({"kind": "end", "model": stream.body["model"], **asdict(answer)}, indent=None)


def _on_screen(stream: AnswerStream) -> None:
    """Print content on standard output; on standard error, dimmed, all that is not the answer."""
    shown = _Shown()
    try:
        with contextlib.closing(stream.pieces()) as pieces:
            for piece in pieces:
                shown.piece(piece)
    finally:
        shown.end()
    answer = stream.answer()
    for call in answer.tool_calls:
        tell(style("tool call: ", bold=True) + f"{call.name}({call.arguments})")
    if line := "; ".join(_counts(answer)):
        tell(style(line, dim=True))


class _Shown:
    """How far an answer is shown: what kind of text came last, and whether its line is open."""

    def __init__(self) -> None:
        self.kind, self.open = "", False

    def piece(self, piece: StreamPiece) -> None:
        text = piece.text
        if piece.kind != self.kind:
            # What a model writes between its reasoning and its answer is blank lines.
            if not (text := text.lstrip("\n" if piece.kind == "content" else None)):
                return
            self.end()
            if self.kind:
                tell("")
            self.kind = piece.kind
            text = f"reasoning: {text}" if piece.kind == "reasoning" else text
        aside = piece.kind == "reasoning"
        flow(text, err=aside, dim=aside)
        self.open = not text.endswith("\n")

    def end(self) -> None:
        if self.open:
            flow("\n", err=self.kind == "reasoning")
        self.open = False


def _counts(answer: StreamedAnswer) -> Iterator[str]:
    """Yield what the server counted, and why an answer ended where that is not its end."""
    if answer.completion_tokens is not None:
        thought = f" ({answer.reasoning_tokens} reasoning)" if answer.reasoning_tokens else ""
        read = answer.prompt_tokens or 0
        yield f"tokens: {read} read, {answer.completion_tokens} written{thought}"
    if answer.first_ms is not None:
        rate = "" if answer.rate is None else f", then {answer.rate:.1f}/s"
        yield f"first after {answer.first_ms:.0f} ms{rate}"
    if answer.finish == "length":
        yield "max_tokens or the context ended it"
    elif answer.finish not in _USUAL_ENDS:
        yield f"finish_reason {answer.finish}"
