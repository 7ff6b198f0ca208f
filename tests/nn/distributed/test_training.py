"""Three real processes train keyed modules as plain networks, and keep what they trained."""

import pytest
from tests.core.distributed.ranks import Results, results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what each program returned on each rank."""
    return results_of("tests.nn.distributed.programs", tmp_path_factory.mktemp("ranks"))


PROGRAMS = [
    "data_parallel",
    "data_parallel_within_other_modules",
    "sharded_by_step",
    "recomputed_in_the_backward_pass",
    "parameters_in_a_container",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_and_gradients_are_those_of_plain_tensors(program: str, results: Results) -> None:
    for found in results[program]:
        assert [case for case in found if case] == []


def test_a_sharded_module_writes_into_the_container_it_got(results: Results) -> None:
    """After calls that failed, and beside a hook of a user, which sees containers."""
    failed = [["InputMissing", ["z"]], ["RuntimeError", ["x"]]]
    for found in results["errors_of_sharded_modules"]:
        assert found[:2] == failed
        assert found[3:] == [True, "torch.float32", "torch.bfloat16", "a", ["TensorDict"] * 3]


def test_parameters_without_a_forward_are_not_sharded_alone(results: Results) -> None:
    expected = "Shard the module that holds it."
    for found in results["errors_of_sharded_modules"]:
        assert found[2].endswith(expected)


def test_a_checkpoint_of_three_ranks_loads_on_two(results: Results) -> None:
    """Containers with sharded leaves, parameters, a sharded keyed module and its optimizer."""
    assert results["checkpoint_of_three_ranks_on_two"] == [[True, True]] * 3


def test_a_checkpoint_that_does_not_fit_one_rank_is_loaded_on_none(results: Results) -> None:
    reason = "`td` cannot take what the checkpoint holds: the state dict is of batch_size (6,)"
    for rank, found in enumerate(results["checkpoint_that_does_not_fit_one_rank"]):
        name, message, *values = found
        assert name == ("ShapeMismatch" if rank == 1 else "InvalidValue")
        assert reason in message
        assert values == [0.0, 0.0]


def test_a_rank_killed_while_it_saves_leaves_the_last_whole_checkpoint(results: Results) -> None:
    *survivors, killed = results["a_rank_killed_while_it_saves"]
    assert killed is None
    for rank, (refused, failed, *rest) in enumerate(survivors):
        assert "holds a checkpoint, which a failure would damage" in refused
        assert f"`save_checkpoint` failed on rank {rank} of 3" in failed
        assert "No report from rank 2: check whether it ended" in failed
        assert rest == ["not whole", [1.0, 1.0]]


def test_operations_on_sharded_leaves_are_those_on_plain_ones(results: Results) -> None:
    """Those that torch offers, with plain tensors beside them too; others name the entry."""
    names = ("broadcast", "all_reduce", "all_gather", "to_buffers", "share_memory_")
    refused = [f"{name}: entry `a`" for name in names]
    asks_for_storage = False
    assert results["operations_on_sharded_leaves"] == [[*refused, asks_for_storage]] * 3
