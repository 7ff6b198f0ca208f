"""Random programs give the same in both libraries, after each line, but for what is decided."""

import pytest
from tests.fuzz.conftest import Seeds

pytest.importorskip("tensordict")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_random_programs_do_the_same_in_both_libraries(request: pytest.FixtureRequest) -> None:
    from tests.interop.programs import check

    seeds = Seeds(request.node.name)
    found = check(seeds(150), seeds.count)
    assert not found, "\n\n".join(
        "\n".join((*each.lines, each.what, f"ours   {each.ours}", f"theirs {each.theirs}"))
        for each in found
    )
