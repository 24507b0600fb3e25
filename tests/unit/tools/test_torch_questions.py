"""Questions to torch, found in Python and in CMake."""

from __future__ import annotations

import ast

from e2e.proofs.torch_questions import asked

WHOLE = "import torch"


def test_a_question_is_an_import_or_what_stands_around_its_name():
    for code, expected in (
        ("import torch", {("torch", WHOLE)}),
        ("import os, torch\ntorch.version.cuda", {("torch.version.cuda", WHOLE)}),
        (
            "import torch\ntorch.version.cuda.split('.')[0]",
            {("torch.version.cuda.split('.')", WHOLE)},
        ),
        ("import torch\ntorch.load(path)", {("torch.load", WHOLE)}),  # nobody knows the path
        (
            "def never():\n    import torch\n    torch.cuda.is_available()",
            {
                ("torch.cuda.is_available()", WHOLE),
            },
        ),
        (
            "import torch.utils as t\nt.x",
            {("t", "import torch.utils as t"), ("t.x", "import torch.utils as t")},
        ),
        (
            "import torch\nimport torch.utils\ntorch.utils.x",
            {
                ("torch.utils.x", "import torch\nimport torch.utils"),
            },
        ),
        (
            "from torch.utils import x as y, z",
            {
                ("y", "from torch.utils import x as y"),
                ("z", "from torch.utils import z"),
            },
        ),
        ("run(['-c', 'import torch; print(torch.__file__)'])", {("torch.__file__", WHOLE)}),
        ("note('first import torch, then go on')", set()),
        ("import torchvision\ntorchvision.x\ntorch = 1\ntorch", set()),
        ("from . import torch_utils\ntorch_utils.x", set()),
    ):
        found = {(each.expression, each.imports) for each, _ in asked(ast.parse(code))}
        assert expected <= found
        assert all(each[0] == "torch" for each in found - expected)
