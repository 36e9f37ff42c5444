# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the wrappers' methods: refused by name, and nothing has changed."""

from __future__ import annotations

import pytest
from attention_arguments import CALLS, outcome, wrong_calls

pytestmark = pytest.mark.filterwarnings("ignore:Passing `q_len_per_req`:DeprecationWarning")


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named(name: str, reference_mode: None) -> None:
    call = CALLS[name]()
    found, tried = [], 0
    for argument, words, wrong in wrong_calls(call):
        tried += 1
        try:
            said = outcome(wrong)
        except Exception as error:
            found.append(f"{words} leaked {error!r}")
            continue
        if said is None:
            found.append(f"{words} was accepted")
            call = CALLS[name]()
        elif argument not in said:
            found.append(f"{words} is not named: {said}")
    assert not found, "\n".join(found)
    assert tried > 5
    assert outcome(call) is None
