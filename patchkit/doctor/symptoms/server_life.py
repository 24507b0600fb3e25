"""Tell from a log when a server served and was stopped, and which errors it outlived."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from patchkit.doctor.symptoms.scan import Hit, Scan
from patchkit.doctor.symptoms.symptom import Symptom, log_words, symptoms


@dataclass(slots=True, kw_only=True)
class Life:
    """The numbers of the lines where a server began to serve, last answered, and was stopped.

    0 means never. ``ended`` says that a symptom which no server outlives came while it served.
    """

    serving: int
    answered: int
    stopped: int
    ended: bool = False

    def outlived(self, first: int, last: int) -> bool:
        """Return whether the server outlived an error in the lines ``first`` to ``last``.

        An error before the server serves, or after it was stopped in order, counts as outlived.
        """
        if not self.serving:
            return False

        was_before = last < self.serving
        was_behind = 0 < self.stopped < first
        if was_before or was_behind:
            return True

        return last < self.answered and not self.ended

    def is_request(self, hit: Hit) -> bool:
        """Return whether an error is of a request: the front end's, while the engine serves."""
        was_serving = 0 < self.serving < hit.number
        return was_serving and not self.ended and "APIServer" in hit.who


def server_lives(
    streams: Mapping[str, Scan],
    answered: Mapping[str, int],
) -> Mapping[str, Life]:
    """Return stream → the life of its server.

    A stream without a server, such as a worker's, gets the life of the first server that served.
    ``answered`` is stream → the last line which says that a request was answered.
    """
    endings: list[str] = []
    for symptom in symptoms().values():
        if symptom.ends:
            endings += symptom.says

    lives = {
        name: _stream_life(part, answered.get(name, 0), endings)
        for name, part in streams.items()
    }

    served = [life for life in lives.values() if life.serving]
    if served:
        first_server = min(served, key=attrgetter("serving"))

        start_texts = log_words().marks["start"]
        for name, part in streams.items():
            starts_server = part.first_line_of(start_texts) > 0
            if not lives[name].serving and not starts_server:
                lives[name] = first_server

    for name, life in lives.items():
        if streams[name].last_line_of(endings) > life.serving:
            life.ended = True

    return lives


def _stream_life(
    part: Scan,
    answered: int,
    endings: list[str],
) -> Life:
    marks = log_words().marks
    # A part of a log that begins behind the start of a server that answers: it served all along.
    is_rest = answered > 0 == part.first_line_of(marks["start"])
    serving = part.first_line_of(marks["serving"]) or int(is_rest)
    if 0 < part.first_line_of(endings) < serving:
        # The server had ended before, so the line about serving is another program's.
        serving = 0

    stopped = part.last_line_of(marks["stopped"])
    if stopped <= serving:
        stopped = 0

    return Life(
        serving=serving,
        answered=answered,
        stopped=stopped,
    )


def unsurvived_hits(
    symptom: Symptom,
    streams: Mapping[str, Scan],
    lives: Mapping[str, Life],
) -> Iterator[Hit]:
    """Yield a symptom's first hit in each stream whose server did not outlive the symptom.

    Hits while the server serves come before earlier ones. A symptom that lasts is never outlived;
    one that a client caused always is, once the server serves.
    """
    for name, part in streams.items():
        hits = sorted(part.hits_of(symptom.says), key=attrgetter("number"))
        if not hits:
            continue

        if symptom.lasts:
            yield hits[0]
            continue

        life = lives[name]
        while_serving = [hit for hit in hits if hit.number > life.serving]
        first_hit = (while_serving or hits)[0]
        is_clients_fault = symptom.request and life.serving > 0

        last_line = part.last_line_of(symptom.says)
        if not is_clients_fault and not life.outlived(first_hit.number, last_line):
            yield first_hit
