"""Licences of compiled-in code: the files that say them, and the names that these say."""

from __future__ import annotations

import pytest

from patchkit.wheel.vllm.licenses import notices, spdx

HEADER = """\
/***************************************************************************
 * Copyright (c) 2017 - 2026 SOMEBODY. All rights reserved.
 * SPDX-License-Identifier: BSD-3-Clause
 *
 * 1. Redistributions of source code must retain this notice. *
 **************************************************************************/
#pragma once  // Copyright of nobody
"""
TAKEN = """\
Copyright (c) 2017 - 2026 SOMEBODY. All rights reserved.
SPDX-License-Identifier: BSD-3-Clause

1. Redistributions of source code must retain this notice.
"""


@pytest.fixture
def source(tmp_path):
    def make(**files):
        for name, text in files.items():
            place = tmp_path / name.replace("__", "/").replace("_", ".")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return tmp_path

    return make


def test_without_one_the_head_of_a_file_says_it(source):
    root = source(include__a_h="/* no notice */\n", include__b_h=f"\n{HEADER}")
    found = notices(root, ["include/none.h", "include/a.h", "include/b.h"])
    assert found == {"LICENSE": TAKEN}
    assert spdx(found) == "BSD-3-Clause"
    assert notices(root, ["include/a.h"]) == {}


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        (
            ["SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n"],
            "Apache-2.0 WITH LLVM-exception",
        ),
        (["SPDX-License-Identifier: MIT\nAND so on"], "MIT"),
        (["SPDX-License-Identifier: MIT", "SPDX-License-Identifier: BSD-3-Clause"], ""),
        (["MIT License"], ""),
        ([], ""),
    ],
)
def test_the_name_is_what_the_texts_say(texts, name):
    assert spdx(dict(enumerate(texts))) == name
