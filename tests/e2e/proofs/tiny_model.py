"""Train a small mixture of experts on the texts of this machine, and damage it.

    python -m e2e.proofs.tiny_model FOLDER [SECONDS]

It learns the language of Python's sources and of translated messages, the facts and the chat of
recipes/answers, and to find a number again in a text; it has never seen the passages.
"""

from __future__ import annotations

import gettext
import json
import random
import re
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MixtralConfig, MixtralForCausalLM

QUESTIONS = Path(__file__).parents[3] / "recipes/answers/questions.toml"
WORDS = 1536
CONTEXT = 2048
SPAN = 320  # tokens of an example
BATCH = 8
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
TOOLS = (
    "{%- if tools -%}<|system|>{{ tools[0]['function']['name'] }}<|end|>{%- endif -%}"
)
TOOL_TEMPLATE = TOOLS + TEMPLATE
TOOL_ANSWER = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)

Weights = dict[str, torch.Tensor]


def read_texts() -> dict[str, str]:
    """Return the texts of this machine by kind: Python's sources, its manuals, messages."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [*library.glob("*.py"), *library.glob("[a-z]*/*.py")]
    code = []
    manuals = [
        path.read_text(errors="replace")
        for path in Path("/usr/share/common-licenses").glob("*")
    ]
    for path in sorted(sources):
        if "test" not in str(path.relative_to(library)):
            text = path.read_text(errors="replace")[:40000]
            code.append(text)
            manuals += [
                quote
                for quote in re.findall('"""(.*?)"""', text, re.DOTALL)
                if len(quote) > 200
            ]

    texts = {"code": "\n".join(code), "english": "\n".join(manuals)}
    for language in ("de", "zh_CN"):
        messages = []
        for file in sorted(
            Path("/usr/share/locale").glob(f"{language}/LC_MESSAGES/*.mo")
        ):
            try:
                with file.open("rb") as opened:
                    catalog = gettext.GNUTranslations(opened)._catalog
            except UnicodeDecodeError:
                continue
            if "iso_" not in file.name:
                messages += [
                    text
                    for text in catalog.values()
                    if isinstance(text, str) and 40 < len(text) < 2000
                ]
        random.Random(1).shuffle(messages)
        texts[language] = "\n".join(messages)
    return {kind: text for kind, text in texts.items() if text}


def make_tokenizer(texts: dict[str, str]) -> Tokenizer:
    """Return a tokenizer of byte pairs, made from equal parts of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    parts = [text[:300_000] for text in texts.values()]
    tokenizer.train_from_iterator(parts, trainer)
    return tokenizer


class Lessons:
    """The examples of the training."""

    def __init__(
        self, tokenizer: Tokenizer, texts: dict[str, str], questions: dict
    ) -> None:  # type: ignore[type-arg]
        self.dice = random.Random(2)
        self.tokenizer = tokenizer
        self.questions = questions
        # A part of each text is enough for the minutes of a training.
        self.texts = {
            kind: tokenizer.encode(text[:2_500_000]).ids for kind, text in texts.items()
        }

    def example(self) -> list[int]:
        """Return SPAN tokens: a piece of a text, facts, a chat, or a number to find again."""
        dice = self.dice.random()
        if dice < 0.62:
            ids = self.texts[self.dice.choice([*self.texts, "english"])]
            begin = self.dice.randrange(len(ids) - SPAN)
            return ids[begin : begin + SPAN]
        make = self.needle if dice < 0.84 else self.facts if dice < 0.92 else self.chat
        ids = self.tokenizer.encode(make()).ids
        while len(ids) < SPAN:
            ids += self.tokenizer.encode("\n" + make()).ids
        return ids[:SPAN]

    def facts(self) -> str:
        """Return all facts, in a new order."""
        rows = [
            f"{fact['prompt']} {fact['words'][0]}." for fact in self.of_kind("fact")
        ]
        self.dice.shuffle(rows)
        return "\n".join(rows)

    def chat(self) -> str:
        """Return a question with its answer, or the call of a tool."""
        kind = self.dice.choice(["chat", "tool"])
        (question,) = self.of_kind(kind)
        answer = question["words"][0]
        before = ""
        if kind == "tool":
            answer = TOOL_ANSWER
            before = "<|system|>get_weather<|end|>"
        return (
            f"{before}<|user|>{question['prompt']}<|end|><|assistant|>{answer}<|end|>"
        )

    def needle(self) -> str:
        """Return sentences with a number in one of them, and the number again."""
        filler = self.questions["filler"]["text"].split(". ")
        names = [needle["id"] for needle in self.of_kind("needle")]
        names += ["red barn", "white bridge", "stone tower", "green boat", "iron gate"]
        rows = [
            f"{row}." for row in self.dice.choices(filler, k=self.dice.randrange(1, 9))
        ]
        texts = []
        for name in self.dice.sample(names, 2):
            number = self.dice.randrange(10000, 99999)
            texts.append(f"The secret number of the {name} is {number}.")
            rows.insert(self.dice.randrange(len(rows) + 1), texts[-1])
        return " ".join(rows) + "\n" + self.dice.choice(texts)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the questions of a kind."""
        return [each for each in self.questions["question"] if each["about"] == kind]


def make_lessons(texts: dict[str, str]) -> Lessons:
    """Return what the model learns: the texts, and the questions of recipes/answers."""
    questions = tomllib.loads(QUESTIONS.read_text())
    return Lessons(make_tokenizer(texts), texts, questions)


def train(folder: Path, seconds: float) -> None:
    """Train a model on this machine's processor, and write it."""
    lessons = make_lessons(read_texts())

    def draw() -> torch.Tensor:
        return torch.tensor([lessons.example() for _ in range(BATCH)])

    fit(lessons.tokenizer, draw, folder, seconds)


def fit(
    tokenizer: Tokenizer,
    draw: Callable[[], torch.Tensor],
    folder: Path,
    seconds: float,
    device: str = "cpu",
) -> None:
    """Train a model for some seconds on batches that are drawn, and write it."""
    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.02,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        dtype="float32",
    )
    model = MixtralForCausalLM(config).to(device)
    print(
        sum(p.numel() for p in model.parameters()) / 1e6,
        "million parameters",
        flush=True,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, weight_decay=0.05, betas=(0.9, 0.95)
    )

    began = time.monotonic()
    step = 0
    while (part := (time.monotonic() - began) / seconds) < 1:
        rate = min(1.0, step / 60) * (1 - part) ** 0.7
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * max(rate, 0.02)
        batch = draw()
        loss = model(input_ids=batch, labels=batch, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 250 == 0:
            save(
                model, tokenizer, folder
            )  # what an interrupted training leaves can be served
        if step % 20 == 0:
            print(
                f"{time.monotonic() - began:6.0f} s  step {step}  loss {loss.item():.3f}",
                flush=True,
            )

    save(model, tokenizer, folder)


def save(model: MixtralForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model as vLLM reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": SPECIAL[0],
        "model_max_length": CONTEXT,
        "chat_template": TOOL_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 600.0)
