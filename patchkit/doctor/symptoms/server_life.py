"""Tell from a log when a server served and was stopped, and which errors it outlived."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from patchkit.doctor.symptoms.scan import Answers, Hit, Scan
from patchkit.doctor.symptoms.symptom import Symptom, log_words, symptoms

_FRONT_END = "APIServer"


@dataclass(slots=True, kw_only=True)
class Life:
    """The numbers of the lines where a server began to serve, last answered, and was stopped.

    0 means never. Of the answers, ``served`` was to a request, not to a question about health.
    ``refuses`` says that it answered several requests, and all of them with an error.
    ``ended`` says that a symptom which no server outlives came while it served.
    """

    serving: int
    answered: int
    served: int
    stopped: int
    refuses: bool
    ended: bool = False

    def outlived(self, hit: Hit, last: int) -> bool:
        """Return whether the server outlived an error from the line of ``hit`` to ``last``.

        An error before the server serves, or after it was stopped in order, counts as outlived.
        So does an error of the front end if a later request was answered.
        """
        if not self.serving:
            return False

        was_before = last < self.serving
        was_behind = 0 < self.stopped < hit.number
        if was_before or was_behind:
            return True

        answered = self.served if _FRONT_END in hit.who else self.answered
        return last < answered and not self.ended

    def is_request(self, hit: Hit) -> bool:
        """Return whether an error is of a request to a server that answers other requests."""
        was_serving = 0 < self.serving < hit.number
        goes_on = self.served > 0 and not self.ended
        return was_serving and goes_on and _FRONT_END in hit.who


def server_lives(
    streams: Mapping[str, Scan],
    answered: Answers,
) -> Mapping[str, Life]:
    """Return stream → the life of its server.

    A stream without a server, such as a worker's, gets the life of the first server that served.
    """
    endings = [
        text for symptom in symptoms().values() if symptom.ends for text in symptom.says
    ]
    lives = {
        name: _stream_life(name, part, answered, endings)
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
    name: str,
    part: Scan,
    answers: Answers,
    endings: list[str],
) -> Life:
    marks = log_words().marks
    good = answers.get(("request", name), 0)
    refuses = not good and len([*part.hits_of(marks["refused"])]) > 1
    refused = answers.get(("refused", name), 0)
    answered = max(good, refused, answers.get(("health", name), 0))
    # A part of a log that begins behind the start of a server that answers: it served all along.
    is_rest = answered > 0 == part.first_line_of(marks["start"])
    serving = part.first_line_of(marks["serving"]) or int(is_rest)
    if 0 < part.first_line_of(endings) < serving:
        # The server had ended before, so the line about serving is another program's.
        serving = 0

    stopped = part.first_line_of(marks["stopped"])
    if stopped <= serving:
        stopped = 0

    return Life(
        serving=serving,
        answered=answered,
        served=good if refuses else max(good, refused),
        stopped=stopped,
        refuses=refuses,
    )


def unsurvived_hits(
    symptom: Symptom,
    streams: Mapping[str, Scan],
    lives: Mapping[str, Life],
) -> Iterator[Hit]:
    """Yield a symptom's first hit in each stream whose server did not outlive the symptom.

    Hits while the server serves come before earlier ones. A symptom that lasts is never outlived;
    one that a client caused always is, once the server serves, unless it refuses all requests.
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
        is_clients_fault = symptom.request and life.serving > 0 and not life.refuses

        last_line = part.last_line_of(symptom.says)
        if not is_clients_fault and not life.outlived(first_hit, last_line):
            yield first_hit
