"""Each refusal has a text, and each field of a text is filled in where it is raised."""

import ast
import string
from pathlib import Path

import patchkit
from patchkit import errors
from patchkit.runtime.rules.releases import read_env_data

CALLS = {"refusal": 0, "cable_refusal": 1}  # where the key stands


def test_every_refusal_is_raised_with_what_its_text_names():
    raised = {}
    for path in Path(patchkit.__file__).parent.glob(
        "[rcd]*/**/*.py"
    ):  # runtime, cluster, doctor
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CALLS:
                key = node.args[CALLS[node.func.id]]
                if isinstance(key, ast.Constant):
                    raised[key.value] = {word.arg for word in node.keywords}
    texts = read_env_data("refusals")
    assert raised.keys() == texts.keys()
    for key, row in texts.items():
        assert issubclass(getattr(errors, row["kind"]), errors.PatchkitError), key
        named = {
            name
            for text in row.values()
            for _, name, *_ in string.Formatter().parse(text)
        }
        given = raised[key] | {"has"}  # which cable_refusal adds
        assert None in given or named - {None} <= given, key  # None: of a mapping
