"""Three ranks exchange random containers, beside a plain reference of each call."""

import json
from itertools import islice
from pathlib import Path

from tests.core.distributed.ranks import results_of
from tests.fuzz.conftest import Seeds

IN_SUITE, AT_ONCE = 150, 400
"""How many programs the suite runs, and how many processes run before new ones are started."""


def test_exchanged_containers_are_those_of_a_plain_reference(seeds: Seeds, tmp_path: Path) -> None:
    programs = seeds(IN_SUITE)
    while chosen := list(islice(programs, AT_ONCE)):
        (tmp_path / "seeds").write_text(json.dumps(chosen))
        (tmp_path / "store").unlink(missing_ok=True)
        found, *_ = results_of("tests.fuzz.rank_worker", tmp_path)["random_programs"]
        assert found is None, "KD_FUZZ_SEED={}, {}: {} | {} | {}".format(*found)
