import pytest

from kd_export._schema.linear_size import LinearSize

SIZES = [LinearSize("n", factor, offset) for factor in (1, 2, 3) for offset in (-2, 0, 1)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_size_is_read_as_it_is_written_and_solved_as_it_is_computed(size: LinearSize) -> None:
    assert LinearSize.parse(str(size)) == size
    values = {size.at(n): n for n in range(30)}
    for value in range(-3, 18):
        assert size.axis_at(value) == values.get(value)
    for other in SIZES:
        solved = size.solve(other)
        equal = {size.at(n): n for n in range(-50, 50)}
        if solved is not None:
            assert all(equal[other.at(m)] == solved.at(m) for m in range(9))
        else:
            assert any(other.at(m) not in equal for m in range(9))


@pytest.mark.parametrize(
    "text", ["", "2", "n*2", "-n", "0*n", "n+-1", "n + 1\n", "2**n", "n" * 300]
)
def test_other_texts_are_no_size(text: str) -> None:
    assert LinearSize.parse(text) is None
