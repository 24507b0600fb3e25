"""Questions to torch, found in Python and in CMake."""

from __future__ import annotations

import ast

from e2e.proofs.torch_questions import Question, asked, questions

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


def test_questions_of_cmake_are_those_of_the_programs_that_it_runs(tmp_path):
    (tmp_path / "cmake" / "external").mkdir(parents=True)
    (tmp_path / "setup.py").write_text("import torch\n\ntorch.version.hip\n")
    (tmp_path / "CMakeLists.txt").write_text(
        """\
# run_python(A "import torch; print(torch.commented)" "")
append_cmake_prefix_path("torch" "torch.utils.cmake_prefix_path")
"""
    )
    (tmp_path / "cmake" / "external" / "a.cmake").write_text(
        """\
if (NEVER)
  execute_process(COMMAND ${Python_EXECUTABLE} -c
    "from torch.utils import x; print(\\"\\;\\".join(x.y))")
  add_custom_command(COMMAND p "${CMAKE_SOURCE_DIR}/cmake/script.py" "${other_SOURCE_DIR}/a.py")
endif()
message(STATUS "now import torch")
"""
    )
    (tmp_path / "cmake" / "script.py").write_text("import torch\ntorch.asked()\n")
    expected = {
        Question("torch", WHOLE): "CMakeLists.txt:2",
        Question("torch.utils.cmake_prefix_path", WHOLE): "CMakeLists.txt:2",
        Question("x", "from torch.utils import x"): "cmake/external/a.cmake:2",
        Question("x.y", "from torch.utils import x"): "cmake/external/a.cmake:2",
        Question("torch.asked()", WHOLE): "cmake/script.py:2",
        Question("torch.version.hip", WHOLE): "setup.py:3",
    }
    assert questions(tmp_path) == expected
