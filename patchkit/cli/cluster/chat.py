"""Talk to a server of the OpenAI API: `patchkit chat`."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import click

from patchkit.cli.cluster.cluster_options import cluster_here
from patchkit.cli.out import ask_line, error_text, flow, style, tell
from patchkit.cli.render import Block, Record, rendered
from patchkit.cluster.agent import node_files
from patchkit.cluster.openai.api_key import key_for
from patchkit.cluster.openai.conversation import (
    ChatAnswer,
    Conversation,
    StreamPiece,
    explain_no_answer,
)
from patchkit.cluster.openai.http_exchange import HttpServer, list_models
from patchkit.doctor.peers.node_report import placed_files
from patchkit.durable.signals import Interrupted
from patchkit.errors import PatchkitError, UsageError
from patchkit.extras import require_libraries
from patchkit.quoting import quoted
from patchkit.reading import read_text

_BODY = quoted("patchkit", "chat", "--body", '{"top_p": 0.9}')
_USUAL_ENDS = ("", "stop", "tool_calls")  # of an answer that is whole


@click.command()
@click.argument("question", required=False)
@click.option("--url", metavar="URL", help="The server; default: what runs on this machine.")
@click.option("--model", metavar="NAME", help="Default: the first that the server names.")
@click.option("--system", metavar="TEXT", help="What the model is told beforehand.")
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Of reasoning and answer.")
@click.option("--think/--no-think", default=None, help="Where the chat template takes that.")
@click.option("--body", metavar="JSON", default="{}", help="More fields of the request: tools …")
@click.option("--key-env", metavar="NAME", help="The variable that holds the server's key.")
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=300,
    show_default=True,
    help="Seconds of silence.",
)
@rendered
def chat_command(
    *, question: str | None, url: str | None, model: str | None, system: str | None, **choices: Any
) -> Iterator[Block]:
    """Talk to a server, and see what it thinks apart from what it says.

    Without QUESTION it reads questions in the terminal: Ctrl-C ends an answer, Ctrl-D the talk.
    The answer goes to standard output, its reasoning, calls of tools and counts beside it.

    \b
      patchkit chat
      patchkit chat "What is six times seven?"
      git diff | patchkit chat --system "Review this." - > review.txt
    """
    asked = read_text(None) if question == "-" else question
    if asked is None and not sys.stdin.isatty():
        raise UsageError("there is no question", hint="… | patchkit chat -")
    if asked is not None and not asked.strip():
        raise UsageError("the question is empty", hint='patchkit chat "What is six times seven?"')
    require_libraries(["openai"], "chat")
    more: object = None
    with contextlib.suppress(ValueError, RecursionError):
        more = json.loads(choices.pop("body"))
    if not isinstance(more, dict):
        raise UsageError("--body: is no JSON object", hint=_BODY)
    if not url:  # as `up` placed it on this machine, else by default
        own = cluster_here().file
        files = node_files.read_placed(node_files.config_folder(own.name))
        placed = placed_files(files, own.unit)
        url = (placed.url if placed else "") or f"http://127.0.0.1:{own.serve.port}"
    bare = HttpServer(url.rstrip("/").removesuffix("/v1"))
    server = replace(bare, key=key_for(bare.url, choices.pop("key_env") or ""))
    if not model:
        listing, models = list_models(server)
        empty = listing.trouble or "no model" * (listing.status == 200)
        answer = ChatAnswer(status=listing.status, trouble=empty)
        if not models and (found := explain_no_answer(server, "", answer, ())):
            raise found.error()
        model = models[0]
    if (think := choices.pop("think")) is not None:
        # A template knows one of them. enable_thinking: Qwen3, Gemma 4, Granite 4.2; thinking:
        # DeepSeek-V3.1, Granite 3.2, Holo2 (vLLM 0.33.0, docs/features/reasoning_outputs.md).
        choices["chat_template_kwargs"] = {"enable_thinking": think, "thinking": think}
    silence = choices.pop("timeout")
    given = {name: value for name, value in choices.items() if value is not None}
    talk = Conversation(
        server=server,
        fields={"model": model, **given, **more},
        silence=silence,
        messages=[{"role": "system", "content": system}] if system else [],
    )
    if asked is None:
        yield from _talk_blocks(talk)
    else:
        yield from _turn_blocks(talk, asked)


def _talk_blocks(talk: Conversation) -> Iterator[Block]:
    """Answer line by line, until the input ends; what goes wrong ends an answer alone."""
    tell(f"{talk.fields['model']} at {talk.server.url}; Ctrl-C ends an answer, Ctrl-D the talk")
    while True:
        try:
            if (asked := ask_line("> ")) is None:
                break
            if asked.strip():
                yield from _turn_blocks(talk, asked)
        except Interrupted as interrupt:
            if interrupt.exit_code != 128 + signal.SIGINT:
                raise
            tell("")
        except PatchkitError as error:
            tell(error_text(error))
    tell("")


def _turn_blocks(talk: Conversation, question: str) -> Iterator[Block]:
    """Ask, show the answer as it comes, and keep what came. Raises HostError for no answer.

    Content goes to standard output, and on standard error, dimmed, all that is not the answer.
    """
    answer, model = ChatAnswer(), str(talk.fields["model"])
    flowing = None if click.get_current_context().params["as_json"] else _Flow()
    try:
        with contextlib.closing(talk.ask(question, answer)) as pieces:
            for piece in pieces:
                # A signal ends an answer: it has to come here, not where blocks are printed.
                if flowing:
                    flowing.show(piece)
                else:
                    yield Record(asdict(piece), line=True)
    finally:
        if flowing:
            flowing.end()
        if answer.content:  # as far as it came
            talk.messages.append({"role": "user", "content": question})
            talk.messages.append({"role": "assistant", "content": answer.content})
    for call in answer.tool_calls:
        if flowing:
            tell(style("tool call: ", bold=True) + f"{call['name']}({call['arguments']})")
        else:
            yield Record({"kind": "tool_call", **call}, line=True)
    if flowing and (line := "; ".join(_counts(answer))):
        tell(style(line, dim=True))
    elif not flowing and answer.status == 200:
        yield Record({"kind": "end", "model": model, **asdict(answer)}, line=True)
    models = list_models(talk.server)[1] if answer.status >= 400 else ()
    if found := explain_no_answer(talk.server, model, answer, models):
        raise found.error()


class _Flow:
    """How far an answer is shown: what kind of text came last, and whether its line is open."""

    def __init__(self) -> None:
        self.kind, self.open = "", False

    def show(self, piece: StreamPiece) -> None:
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


def _counts(answer: ChatAnswer) -> Iterator[str]:
    """Yield what the server counted, and why an answer ended where that is not its end."""
    if answer.completion_tokens is not None:
        thought = f" ({answer.reasoning_tokens} reasoning)" if answer.reasoning_tokens else ""
        read = answer.prompt_tokens or 0
        yield f"tokens: {read} read, {answer.completion_tokens} written{thought}"
    if answer.first_ms is not None:
        tokens, seconds = answer.completion_tokens or 0, (answer.ms - answer.first_ms) / 1000
        # Of fewer, or in less time, a rate says nothing.
        rate = f", then {(tokens - 1) / seconds:.1f}/s" if tokens > 4 and seconds > 0.05 else ""
        yield f"first after {answer.first_ms:.0f} ms{rate}"
    if answer.finish == "length":
        yield "max_tokens or the context ended it"
    elif answer.finish not in _USUAL_ENDS:
        yield f"finish_reason {answer.finish}"
