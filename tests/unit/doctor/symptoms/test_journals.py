"""The first line of all ranks that says what went wrong."""

import pytest

from patchkit.cluster.agent.unit_state import JournalLine
from patchkit.cluster.launch.cluster import merge_by_time
from patchkit.doctor.symptoms.findings import first_error, read_journals


def lines(node, *texts, start=0, step=2):
    return [
        (node, JournalLine(time=start + step * number, unit="patchkit-vllm.service", text=text))
        for number, text in enumerate(texts)
    ]


HEAD = (
    "INFO loading",
    "(EngineCore_DP0 pid=1) ERROR 11-22 [core.py:1] Traceback (most recent call last):",
    "RuntimeError: Engine core initialization failed. See root cause above.",
)
CASES = {
    "the worker's own error comes before what the head makes of it": (
        HEAD,
        ("INFO", "(Worker_TP1) ERROR ValueError: bad head size", "INFO shutting down"),
        ("spark-2", "(Worker_TP1) ERROR ValueError: bad head size"),
    ),
    "what follows from another error, if there is no other": (
        HEAD,
        ("INFO",),
        ("spark-1", "RuntimeError: Engine core initialization failed. See root cause above."),
    ),
    "CUDA without a class of its own": (
        ("CUDA error: no kernel image is available for execution on the device",),
        (),
        ("spark-1", "CUDA error: no kernel image is available for execution on the device"),
    ),
    "a word that only looks like one": (("INFO ErrorHandler is on",), ("no errors",), None),
}


@pytest.mark.parametrize("case", CASES)
def test_first_error(case):
    head, worker, expected = CASES[case]
    both = [lines("spark-1", *head), lines("spark-2", *worker, start=1)]
    found = first_error(merge_by_time(map(iter, both)))
    assert found == expected


def test_the_cause_and_the_node_of_a_known_error():
    worker = ("INFO loading", "ImportError: libcudart.so.12: cannot open shared object file")
    both = merge_by_time(
        [iter(lines("spark-1", *HEAD)), iter(lines("spark@10.0.0.2", *worker, start=-1))]
    )

    log, nodes = read_journals(both, {})

    assert log.first is not None
    assert log.first.symptom.id == "cuda-12-library-missing"
    assert nodes[log.first.hit.number - 1] == "spark@10.0.0.2"
    assert [each.symptom.follows for each in log.diagnoses] == [False, True]
