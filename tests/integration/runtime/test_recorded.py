"""Show as recorded what a ledger says was proved: a run vouches for what it did itself."""

import json

import pytest

from patchkit import __version__
from patchkit.apply import apply
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.target import targets


@pytest.mark.releases
def test_proved_is_what_this_run_proved_and_recorded_what_an_earlier_one_did(cli, tree):
    root = tree("0.19.1")
    date = {"SOURCE_DATE_EPOCH": "1795305600"}
    first = cli("apply", "--vllm-src", root, "-v", env=date).stdout
    proved = [
        line.removeprefix("proved ") for line in first.splitlines() if "proved " in line
    ]
    assert len(proved) > 3

    again = cli("apply", "--vllm-src", root, "-v").stdout.splitlines()
    fields = json.loads(cli("apply", "--vllm-src", root, "--json").stdout)

    by = f"patchkit {__version__} on 2026-11-22"
    count = f"{len(proved)} effects"
    assert f"recorded as proved by {by}, not proved again: {count}" in again
    assert not [line for line in again if line.startswith("proved ")]
    assert (fields["proofs"], fields["recorded_proofs"]) == ([], proved)
    assert fields["recorded_by"] == by

    ledger = root / ".patchkit/ledger.json"
    table = json.loads(ledger.read_text())
    ledger.write_text(json.dumps({**table, "proofs": ["anything: I was never run"]}))
    forged = cli("apply", "--vllm-src", root, "-v").stdout
    assert "proved anything" not in forged
    assert "2026-11-22, not proved again: 1 effects" in forged
    anew = apply(
        root, load_recipe("vllm"), Request(target=targets()["gb10"]), anew=True
    )
    assert (list(anew.proofs), anew.recorded_proofs) == (proved, ())
    first, *others = table["verdicts"]
    for words in ({"id": "unknown"}, {"state": "blessed"}, {"severity": "fatal"}):
        ledger.write_text(
            json.dumps({**table, "verdicts": [{**first, **words}, *others]})
        )
        said = cli("fixes", "--vllm-src", root, rc=4).stderr
        assert f"patchkit revert --vllm-src {root} --force" in said
