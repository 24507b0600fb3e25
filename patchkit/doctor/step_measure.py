"""Measure a decoding step of a server on this machine, and explain it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from patchkit.cluster.agent.installation import share_folder
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.start_plan import make_plan
from patchkit.cluster.openai.server_answers import FoundServer, find_server
from patchkit.cluster.ssh.answer import encoded
from patchkit.cluster.ssh.ssh import HERE
from patchkit.doctor.answers import find_back_ends
from patchkit.doctor.gpu import GpuNode, run_all_reduce, slowest_figures
from patchkit.doctor.gpu_steps import GpuStep, run_step
from patchkit.doctor.step_load import LoadSample, StepLoad, run_load
from patchkit.doctor.step_parts import StepMeasurements, StepParts, explain_step
from patchkit.doctor.step_server import (
    ServerProcess,
    engine_facts,
    find_server_process,
    read_log,
)
from patchkit.durable.atomic import replacing
from patchkit.errors import HostError, PatchkitError
from patchkit.foreign import positive_number
from patchkit.frozen import Fields, frozen
from patchkit.reading import read_bytes, read_text
from patchkit.records import RECIPES, RecordError, read_json, read_toml
from patchkit.runtime.memory.cache import DRAFTING_LAYERS
from patchkit.runtime.memory.checkpoint import model_folders, read_count
from patchkit.runtime.rules.presets import find_preset, find_recipe
from patchkit.units import BYTES_PER_GIB

_SETTINGS = read_toml(Fields, RECIPES / "bench.toml", key="why")
_LINES = 5000  # of a log: more than a start writes
_LARGEST = 64 << 20  # bytes of a log
_TRANSPORT = re.compile(r"\bvia (NET/\w+|P2P|SHM)")
_MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
_PASSED = re.compile(r"NCCL_|LD_LIBRARY_PATH|PYTHONPATH|CUDA_|VIRTUAL_ENV|PATH$")
_FAR = 2  # times the tokens of a step: a CUDA graph that is so large wastes work

Tell = Callable[[str], None]


@frozen
class StepRequest:
    """What to explain: the server at ``url``, "" for that of the cluster, under ``requests``.

    ``log`` is the file that the server wrote, None to find it; ``python`` runs the GPU's part, ""
    for the server's own. ``seconds`` are for the load; ``tell`` gets a line before each part.
    """

    cluster: Cluster
    model: str
    url: str
    requests: int
    log: Path | None
    python: str
    seconds: float
    tell: Tell


def explain_server(request: StepRequest) -> StepParts:
    """Measure a server under a load and, when it is idle again, its GPU; explain its step.

    Raises HostError if the server is not on this machine, is another user's, or fails.
    """
    if not request.url and not request.cluster.head.here:
        raise HostError(
            f"{request.cluster.head.destination} is not this machine",
            hint="run it on the first node of cluster.toml",
        )
    place = find_server(request.url, request.cluster.name)
    listing = place.server.ask("/v1/models")
    name = listing.value("data", 0, "id")
    if not isinstance(name, str):
        raise HostError(
            f"{place.server.url} does not answer, or serves no model",
            hint=f"patchkit up {request.model}",
        )

    process = find_server_process(urlsplit(place.server.url).port or 80)
    lines = list(_log_lines(request, place, process))
    facts = engine_facts(process, read_log(lines))
    root = str(listing.value("data", 0, "root") or request.model)
    config = _read_config(str(place.started.get("folder") or root), process)

    request.tell(f"{request.requests} requests at once: {request.seconds:.0f} s")
    load = _load(request, positive_number(listing.value("data", 0, "max_model_len")))
    visible = process.variables.get("CUDA_VISIBLE_DEVICES", "")
    gpus = [index for index in visible.split(",") if index.isdigit()]
    ranks = int(facts["ranks"])
    sample = run_load(
        place.server,
        name,
        load,
        process.children or (process.pid,),
        gpus or [str(index) for index in range(ranks)],
    )

    case = _Case(
        request=request,
        place=place,
        process=process,
        config=config,
        engine=facts,
        sample=sample,
    )
    request.tell("the GPU, beside the idle server")
    return explain_step(case.measurements(find_back_ends(lines)))


def keep_step(explained: StepParts, folder: Path) -> None:
    """Write why.json into a folder, and as the newest record of this machine, for `proof`."""
    for path in (folder / "why.json", _record_path()):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(encoded(explained).encode())


def read_step() -> Fields:
    """Return the newest record of this machine as values for JSON, {} if there is none."""
    with contextlib.suppress(PatchkitError, RecordError, OSError):
        return read_json(Fields, read_text(_record_path(), follow=False))
    return {}


def _record_path() -> Path:
    return share_folder("bench") / "why.json"


def _log_lines(
    request: StepRequest, place: FoundServer, process: ServerProcess
) -> Iterable[str]:
    """Return the first lines of the server's log: --log, its journal, or the file it writes to."""
    path = request.log or process.log
    if path:
        text = read_bytes(path, limit=_LARGEST).decode(errors="replace")
        return islice(text.splitlines(), _LINES)
    if place.started:
        journal = read_group_journal(request.cluster, lines=_LINES)
        return [line.text for _node, line in journal.lines]
    return []


def _load(request: StepRequest, context: float) -> StepLoad:
    tokens = _SETTINGS["tokens"]
    return StepLoad(
        requests=request.requests,
        prompt=_SETTINGS["prompt"],
        tokens=min(tokens, int(context // 2)) if context else tokens,
        seconds=request.seconds,
        settle=_SETTINGS["settle"],
    )


def _read_config(model: str, process: ServerProcess) -> Mapping[str, Any]:
    """Return the config of a model, {} if it is not on this machine."""
    for folder in model_folders(model, process.variables):
        try:
            config = read_json(Fields, read_bytes(folder / "config.json"))
            return {**config, **config.get("text_config", {})}
        except (PatchkitError, RecordError, OSError, TypeError):
            continue
    return {}


@frozen
class _Case:
    """A server, what it says of itself, and its load."""

    request: StepRequest
    place: FoundServer
    process: ServerProcess
    config: Mapping[str, Any]
    engine: Mapping[str, Any]
    sample: LoadSample

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share a layer."""
        return int(self.engine["ranks"])

    @property
    def layers(self) -> int:
        """Return the number of layers, 0 if unknown."""
        return read_count(self.config, "num_hidden_layers")

    @property
    def batch(self) -> int:
        """Return the tokens that a step computes: a drafted token needs as much as another."""
        drafted = round(self.sample.drafted)
        return max(round(self.sample.running * (1 + drafted)), 1)

    def measurements(self, back_ends: str) -> StepMeasurements:
        """Return all measurements; those of the GPU are made here."""
        sample = self.sample
        weights, weights_source = self._weights()
        gpu = self._measure_gpu(weights)
        bandwidth, bandwidth_source = self._bandwidth(gpu)
        read_bytes = weights + sample.kv_usage * self._speed()[1]
        all_reduce = self._measure_all_reduce()
        figure = f"microseconds_in_a_row_{self._message}"
        microseconds = positive_number(all_reduce.figures.get(figure)) or None

        kernel_ms = None
        if gpu.figures and bandwidth:
            layer = float(gpu.figures["layer_microseconds"])
            read = float(gpu.figures["layer_bytes"]) / bandwidth / 1000
            kernel_ms = max(layer - read, 0.0) * self.layers / 1000

        idle = sample.gpu.get("utilization.gpu")
        facts = {
            **self._graph_facts(),
            **self._drafter_facts(),
            **self._clock_facts(),
            "transport": _transport(all_reduce),
            "variables": self._network_variables(),
            "back_ends": f"the log names {back_ends}",
            "back_end": self.engine["back_end"],
            "forced": "yes" if self._forced() else "no",
            "eager": self.engine["eager"],
            "drafts": self.engine["drafts"],
            "max_seqs": self.engine["max_seqs"],
            "process": sample.process,
            "kv_usage": sample.kv_usage,
            "accepted": sample.accepted,
            "drafted": sample.drafted,
            "idle": None if idle is None else 1 - idle / 100,
        }
        return StepMeasurements(
            step_ms=sample.seconds / sample.steps * 1000,
            tokens=sample.tokens / sample.steps,
            requests=sample.running,
            waiting=sample.waiting,
            read_bytes=read_bytes or None,
            bandwidth=bandwidth or None,
            kernel_ms=kernel_ms,
            layers=self.layers,
            ranks=self.ranks,
            all_reduce_us=microseconds,
            idle=None if idle is None else 1 - idle / 100,
            delay=sample.delay,
            sources={
                "memory": _memory_source(
                    (read_bytes, weights_source), (bandwidth, bandwidth_source)
                ),
                "kernels": gpu.reason
                or "a stand-in for a layer, replayed as a CUDA graph",
                "all-reduce": self._reduce_source(all_reduce),
                "host": _host_source(sample),
            },
            facts=facts,
        )

    def _speed(self) -> Sequence[float]:
        """Return weights and cache in bytes and bytes per second, as `up` planned them."""
        return tuple(map(positive_number, self.place.started.get("speed", (0, 0, 0))))

    def _weights(self) -> tuple[float, str]:
        planned = self._speed()[0]
        if planned:
            return planned, "planned"
        gib = positive_number(self.engine["weights_gib"])
        return gib * BYTES_PER_GIB, "by the log" if gib else "unknown, without a log"

    def _python(self) -> str:
        """Return the Python that tries the GPU, "" if there is none here."""
        if self.request.python or self.process.is_contained:
            return self.request.python
        return self.process.python

    def _variables(self) -> dict[str, str]:
        """Return the server's variables on which NCCL, CUDA and imports depend."""
        return {
            name: value
            for name, value in self.process.variables.items()
            if _PASSED.match(name)
        }

    def _measure_gpu(self, weights: float) -> GpuStep:
        """Measure bandwidth and kernels beside the idle server."""
        python = self._python()
        hidden = read_count(self.config, "hidden_size")
        obstacle = (
            "" if python else "the server is in a container: name a Python, --venv DIR"
        )
        if not (weights and hidden and self.layers):
            obstacle = "the model's shape is not known"
        if obstacle:
            return GpuStep(step="decode", state="not-run", reason=obstacle)

        settings = {
            **_SETTINGS["decode"],
            "hidden": hidden,
            "layers": self.layers,
            "layer_bytes": int(weights / self.layers),
            "tokens": self.batch,
        }
        return run_step(python, settings, self._variables())

    def _bandwidth(self, gpu: GpuStep) -> tuple[float, str]:
        """Return GB/s: measured, else that of the device's row."""
        rates = [
            positive_number(rate)
            for name, rate in gpu.figures.items()
            if name.endswith("gigabytes_per_second")
        ]
        if rates:
            return max(rates), "a copy and a product measured"
        return self._speed()[2] / 1e9, f"not measured: {gpu.reason}"

    @property
    def _message(self) -> int:
        """Return the bytes of an all-reduce: a vector in 16 bits for each token of a step."""
        return 2 * self.batch * read_count(self.config, "hidden_size")

    def _measure_all_reduce(self) -> GpuStep:
        """Measure an all-reduce over the server's ranks, with their variables."""
        step = {**_SETTINGS["all-reduce"], "sizes": [self._message]}
        missing = GpuStep(step="all-reduce", state="not-run", reason="not measured")
        if self.ranks == 1 or not self._message:
            return missing
        results = run_all_reduce(self._nodes(), step)
        lines = tuple(chain.from_iterable(result.lines for result in results))
        worst = max(results, key=lambda result: result.reason)
        return GpuStep(
            step=worst.step,
            state=worst.state,
            reason=worst.reason,
            figures=slowest_figures(results),
            lines=lines,
        )

    def _nodes(self) -> list[GpuNode]:
        cluster = self.request.cluster
        if self.place.started and len(cluster.nodes) > 1:
            planned = make_plan(cluster, self.request.model).units.ranks
            return [
                GpuNode(
                    node=node.destination,
                    python=self.request.python or f"{rank.facts.venv}/bin/python",
                    address=rank.address,
                    variables={item.name: item.value for item in rank.env.settings},
                )
                for node, rank in zip(cluster.nodes, planned, strict=True)
            ]

        variables = self._variables()
        visible = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if len(visible) >= self.ranks else range(self.ranks)
        return [
            GpuNode(
                node=HERE,
                python=self._python(),
                address="127.0.0.1",
                variables={**variables, "CUDA_VISIBLE_DEVICES": str(device)},
            )
            for device in list(devices)[: self.ranks]
        ]

    def _reduce_source(self, all_reduce: GpuStep) -> str:
        if self.ranks == 1:
            return "one rank needs none"
        if all_reduce.state != "ok":
            return all_reduce.reason
        size = self._message / 1024
        return (
            f"2 for each of {self.layers} layers, {size:.3g} KiB, over "
            f"{_transport(all_reduce)}, measured by NCCL alone"
        )

    def _network_variables(self) -> str:
        settings = [
            f"{name}={value}"
            for name, value in self._variables().items()
            if name.startswith("NCCL_") and "DEBUG" not in name
        ]
        return f"the server has {' '.join(settings) or 'no variable of NCCL'}"

    def _forced(self) -> str:
        """Return the back ends that no rule chose; `up` takes flags of cluster.toml as well."""
        if not self.place.started:
            return str(self.engine["back_end"])
        return " ".join(
            word for word in self.request.cluster.serve.args if "-backend" in word
        )

    def _graph_facts(self) -> Fields:
        sizes = self.engine["sizes"]
        batch = self.batch
        facts: Fields = {"batch": float(batch), "graphs": "fit"}
        if sizes and self.engine["eager"] == "no":
            larger = [size for size in sizes if size >= batch]
            facts["largest_graph"] = float(sizes[-1])
            facts["next_graph"] = float(larger[0] if larger else 0)
            if not larger:
                facts["graphs"] = "above"
            elif larger[0] > _FAR * batch:
                facts["graphs"] = "far"
        return facts

    def _drafter_facts(self) -> Fields:
        """Return whether the model has a drafter: by its preset or recipe, or its config."""
        names = (self.request.model, self.place.started.get("model", ""))
        settings = []
        for name in filter(None, map(str, names)):
            preset = find_preset(name)
            recipe = find_recipe(name)
            settings += [row.drafter for row in (preset, recipe) if row and row.drafter]

        source = "its preset"
        layers = [read_count(self.config, key) for key in DRAFTING_LAYERS]
        if not settings and any(layers):
            source = "its config"
            settings = [_MTP]
        return {
            "drafter": "yes" if settings else "no",
            "drafter_source": source,
            "drafter_setting": settings[0] if settings else "",
        }

    def _clock_facts(self) -> Fields:
        gpu = self.sample.gpu
        most = gpu.get("clocks.max.sm") or 0.0
        now = gpu.get("clocks.sm")
        return {
            "mhz": now,
            "clock": now / most if now and most else None,
            "watts": gpu.get("power.draw"),
            "celsius": gpu.get("temperature.gpu"),
        }


def _transport(all_reduce: GpuStep) -> str:
    """Return how NCCL moved data, by its own lines: NET/… goes before P2P and SHM."""
    matches = _TRANSPORT.findall("\n".join(all_reduce.lines))
    return min(matches, default="unknown")


def _memory_source(size: tuple[float, str], rate: tuple[float, str]) -> str:
    """Return what is read and how fast, in words, with how both are known."""
    read = f"{size[0] / 1e9:.3g} GB ({size[1]})" if size[0] else f"bytes {size[1]}"
    speed = f"{rate[0]:.4g} GB/s" if rate[0] else "an unknown speed"
    return f"{read} at {speed} ({rate[1]})"


def _host_source(sample: LoadSample) -> str:
    busy = sample.gpu.get("utilization.gpu")
    texts = []
    if busy is not None:
        texts.append(f"nvidia-smi: the GPU is busy {busy:.0f} % of the time")
    if sample.delay is not None:
        texts.append(f"{sample.process} waits for a core {100 * sample.delay:.0f} %")
    return "; ".join(texts) or "not measured"
