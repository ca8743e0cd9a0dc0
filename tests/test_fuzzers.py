"""The fuzzers of records and TOML find nothing in their first mutants."""

import pytest

import fuzz_records
import fuzz_toml
from fuzzing import ACCEPTED, FAILED, REFUSED, try_mutant
from probmask.errors import InputError


@pytest.mark.parametrize("fuzzer", [fuzz_records, fuzz_toml], ids=lambda module: module.__name__)
def test_mutants_are_accepted_or_refused(fuzzer, tmp_path):
    attempts = fuzzer.make_attempts(tmp_path)
    found = [try_mutant(attempts, seed) for seed in range(48)]
    assert [trace for _, _, trace in found if trace] == []
    assert {name for name, _, _ in found} == set(attempts)
    assert {outcome for _, outcome, _ in found} >= {ACCEPTED, REFUSED}


def test_an_outcome_is_a_refusal_or_a_failure():
    def refuse(rng):
        raise InputError("no")

    def fail(rng):
        raise KeyError(rng.random())

    assert try_mutant({"kind": refuse}, 0)[:2] == ("kind", REFUSED)
    _, outcome, trace = try_mutant({"kind": fail}, 0)
    assert outcome.startswith(f"{FAILED}: KeyError in test_fuzzers.py:")
    assert "Traceback" in trace
    assert try_mutant({"kind": fail}, 0)[1] == outcome != try_mutant({"kind": fail}, 1)[1]
