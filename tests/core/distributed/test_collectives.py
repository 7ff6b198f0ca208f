"""Three real processes exchange containers; each rank ends with what plain tensors would give."""

import pytest
from tests.core.distributed.programs import plain, ragged, told, told_ragged
from tests.core.distributed.ranks import RANKS, Results, results_of

ROWS = [told_ragged(ragged(rank)) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what each program returned on each rank."""
    return results_of("tests.core.distributed.programs", tmp_path_factory.mktemp("ranks"))


def test_broadcast_writes_in_place(results: Results) -> None:
    assert results["broadcast_in_place"] == [[True, True, told(plain(1))]] * RANKS


def test_large_leaves_are_broadcast_one_by_one(results: Results) -> None:
    values = ["1.0", "1.0", "(1+1j)", "0.0", "0.0", "1j"]
    expected = [[value, True] for value in values]
    assert results["broadcast_of_large_leaves"] == [expected] * RANKS


def test_broadcast_makes_what_a_rank_lacks(results: Results) -> None:
    expected = [ROWS[2], ROWS[2], [3]]
    assert results["broadcast_to_none_and_to_an_empty_container"] == [expected] * RANKS
    assert results["broadcast_of_data_in_place"] == [[[1, 1], ["1", "x"], [1.0, 1.0]]] * RANKS


def test_broadcast_replaces_a_value_for_the_whole_batch(results: Results) -> None:
    for rank, (names, refusal, leaf, name) in enumerate(
        results["broadcast_of_data_for_a_whole_batch"]
    ):
        assert names == ["1"] * 3
        assert ("another value of `name`" in refusal) is (rank != 1)
        assert (leaf, name) == ([rank, rank], f"{rank}")  # nothing is written in part


def test_all_reduce_reduces_and_leaves_data_as_it_is(results: Results) -> None:
    for rank, found in enumerate(results["all_reduce_of_few_and_of_many_bytes"]):
        assert found == [[value, value, f"{rank}"] for value in (6.0, 2.0, 3.0, 1.0, 6.0)] * 2


def test_what_all_rows_share_is_exchanged_as_other_leaves_are(results: Results) -> None:
    for rank, found in enumerate(results["exchanges_of_what_all_rows_share"]):
        reduced = 6.0 if rank == 1 else rank + 1.0
        each = [[value] * 4 for value in (6.0, 3.0, reduced, 1.0)]
        assert found == [*each, *each, True, [0.0, 1.0, 2.0], [7.0] * 3]


def test_all_reduce_takes_every_dtype_of_numbers(results: Results) -> None:
    expected = ["6.0"] * 4 + ["6"] * 4 + ["(6+0j)"] * 2
    assert results["all_reduce_of_every_dtype"] == [[expected] * 2] * RANKS


def test_all_reduce_runs_later_and_in_pieces(results: Results) -> None:
    assert results["all_reduce_later_and_in_pieces"] == [[[3.0], [3.0, 3.0], True]] * RANKS


def test_reduce_writes_on_one_rank_only(results: Results) -> None:
    assert results["reduce_to_one_rank"] == [[0.0, 0.0], [3.0, 3.0], [2.0, 2.0]]


def test_ragged_rows_are_shared_by_tokens_and_come_back_in_order(results: Results) -> None:
    found = results["shared_by_tokens"]
    assert [whole for whole, _ in found] == [True] * RANKS
    assert sorted(tokens for _, tokens in found) == [9, 9, 10]


def test_members_and_parameters_are_reduced(results: Results) -> None:
    expected = [[[3.0], [3.0, 3.0]], [[1.0, 1.0]]]
    assert results["all_reduce_of_members_and_parameters"] == [expected] * RANKS


def test_gathered_containers_keep_ragged_rows_and_data(results: Results) -> None:
    for rank, (parts, at_one, lengths) in enumerate(results["gathered_rows"]):
        assert parts == ROWS
        assert at_one == (ROWS if rank == 1 else None)
        assert lengths == [0, 1, 2]
    assert results["gathered_with_long_headers"] == [[[0], [1], [2]]] * RANKS


def test_gather_and_stack_writes_rows_in_the_order_of_ranks(results: Results) -> None:
    assert results["gathered_and_stacked"] == [
        [False, [0.0, 0.0]],
        [True, [[0.0, 0.0], [2.0, 2.0]]],
        [False, [2.0, 2.0]],
    ]


def test_scatter_gives_each_rank_its_own(results: Results) -> None:
    assert results["scattered"] == ROWS


def test_sent_containers_are_received(results: Results) -> None:
    zeros = [[0.0, 0.0]] * 2
    assert results["sent_and_received"] == [[], [zeros, zeros, [0.0, 0.0]], []]


def test_two_ranks_send_before_they_receive(results: Results) -> None:
    assert results["sent_later_to_each_other"][:2] == [
        [[rank, rank], [f"{rank}", "x"], [[rank], [rank, rank]]] for rank in (1, 0)
    ]


def test_calls_of_programs_of_tensordict_run(results: Results) -> None:
    received = [[[1.0, 1.0], [1.0, 1.0]]] * 6
    assert results["sent_as_programs_of_tensordict_do"] == [[], received, []]
    assert results["scattered_by_a_method"] == [[[float(rank)] * 2] * 2 for rank in range(3)]


def test_a_rank_makes_a_container_from_another_one(results: Results) -> None:
    assert results["made_from_another_rank"] == [ROWS[0], [ROWS[0]] * 2, [ROWS[0]] * 2]


def test_a_group_has_ranks_of_its_own(results: Results) -> None:
    outsider, *members = results["within_a_part_of_the_ranks"]
    assert outsider[0] == "InvalidValue"
    for values, (name, message) in members:
        assert values == [[4.0, 4.0]] * 2
        assert name == "InvalidValue"
        assert message == "`src` must be a rank of the group, got 0 for a group of 2."


def test_what_does_not_fit_is_received_and_not_written(results: Results) -> None:
    (name, message), before, after = results["received_in_an_unlike_container"][1]
    assert name == "ShapeMismatch"
    assert "entry `a` has the shape (3,) on rank 1, but (2,) on rank 0" in message
    assert (before, after) == ([1.0] * 3, [1.0] * 3)


def test_ranks_that_differ_are_told_how_before_data_moves(results: Results) -> None:
    expected = [
        ("ShapeMismatch", "entry `a` has the shape (2,) on rank 0, but (3,) on rank 1"),
        ("KeySetMismatch", "entry `('n', 'c')` exists on rank 0, but not on rank 1"),
        ("InvalidValue", "entry `a` is float32 on rank 0, but float64 on rank 2"),
        ("InvalidValue", "entry `a` is int64, whose mean over ranks is not offered"),
        ("InvalidValue", "some of its elements share memory"),
        ("ShapeMismatch", "entry `a` has the shape (-1, 3) on rank 0, but (-1, 4) on rank 1"),
        (
            "InvalidArgument",
            "got `all_reduce(op=max)` on rank 0 and `all_reduce(op=sum)` on rank 1",
        ),
        ("InvalidArgument", "got `broadcast(src=0)` on rank 0 and `all_reduce(op=sum)` on rank 1"),
        ("InvalidValue", "must start with 2, a row for each other rank, got ()"),
        ("Invalid", "must have one container for each of 3 ranks on rank `src`, got 1"),
        ("Invalid", "`td` must be a container on rank `src`, got `None`"),
        ("InvalidValue", "entry `a` is of layout torch.sparse_coo"),
        ("InvalidValue", "entry `tokens` is jagged int64, and cannot be written in place"),
        ("InvalidValue", "entry `a` cannot be written in place: some of its elements share"),
    ]
    for found, values in results["calls_that_do_not_agree"]:
        assert values == [3.0, 3.0]
        for (name, message), (error, part) in zip(found, expected, strict=True):
            assert name.startswith(error)
            assert part in message


def test_many_ranks_agree_as_few_do(results: Results) -> None:
    expected = ["ShapeMismatch", [[3.0] * 2] * 2, ROWS[1], ROWS]
    assert results["agreement_in_a_large_group"] == [expected] * RANKS


def test_a_rank_that_does_not_answer_is_an_error_in_time(results: Results) -> None:
    for rank in (0, 2):
        name, message, values = results["a_rank_that_does_not_answer"][rank]
        assert name == "CommunicationError"
        assert f"`all_reduce` failed on rank {rank} of 3, in call 2 on this group" in message
        assert "the last one that succeeded: call 1, `all_reduce`" in message
        assert "No report from rank 1: check whether it ended, or did not" in message
        assert values == [2.0, 2.0]


def test_a_rank_that_ends_is_an_error_and_nothing_is_written(results: Results) -> None:
    for rank in (0, 1):
        name, message, values = results["a_rank_that_ends"][rank]
        assert name == "CommunicationError"
        assert "No report from rank 2: check whether it ended, or did not" in message
        assert values == [float(rank)]


def test_the_rank_that_does_not_send_is_named(results: Results) -> None:
    waiting, *others = results["a_rank_that_does_not_send"]
    assert others == [[], []]
    assert waiting[0] == "CommunicationError"
    assert "`recv` failed on rank 0 of 3" in waiting[1]
    assert "Check whether rank 2 ended, or did not answer within the timeout" in waiting[1]
