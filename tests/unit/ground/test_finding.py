"""Check what findings amount to for the command that reports them."""

from patchkit.errors import HostError, ProofError, SourceError
from patchkit.finding import Finding, Level, worst


def test_the_worst_finding_decides_the_exit_code():
    for findings, levels, code in (
        ([], (), 0),
        (
            [
                (Level.OK, HostError),
                (Level.UNKNOWN, HostError),
                (Level.NOTE, HostError),
            ],
            (),
            0,
        ),
        ([(Level.WARNING, SourceError)], (), 0),
        ([(Level.WARNING, SourceError)], (Level.ERROR, Level.WARNING), 3),
        ([(Level.ERROR, ProofError), (Level.ERROR, SourceError)], (), 5),
        ([(Level.ERROR, SourceError), (Level.WARNING, HostError)], (), 3),
    ):
        found = [
            Finding(what="it is so", level=level, kind=kind) for level, kind in findings
        ]
        assert worst(found, *levels) == code
