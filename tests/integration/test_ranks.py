"""The programs of `examples/ranks` compute on three ranks what they compute in one process."""

import pytest
from examples.ranks import grpo, ppo, transformer
from tests.core.distributed.ranks import Results, results_of
from tests.integration.rank_programs import told


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what each program returned on each rank."""
    return results_of("tests.integration.rank_programs", tmp_path_factory.mktemp("ranks"))


def test_gradients_of_all_ranks_are_averaged(results: Results) -> None:
    agent, expected = ppo.train(1)
    for figures, history in results["data_parallel_ppo"]:
        assert history["steps"] == expected["steps"]
        assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for found, own in zip(figures, told(agent), strict=True):
            assert found == pytest.approx(own, rel=1e-5, abs=1e-5)


def test_ragged_prompts_are_answered_by_all_ranks(results: Results) -> None:
    agent, expected, answers = grpo.train(2)
    assert answers is not None
    for rank, (figures, history, texts) in enumerate(results["scattered_grpo"]):
        assert history["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert history["reward"] == (expected["reward"] if rank == 0 else [])
        assert texts == (answers["text"] if rank == 0 else None)
        for found, own in zip(figures, told(agent), strict=True):
            assert found == pytest.approx(own, rel=1e-3, abs=1e-3)


def test_a_sharded_transformer_goes_on_with_fewer_ranks(results: Results) -> None:
    training = transformer.Training()
    training.train(4)
    expected = training.history["loss"][:4].tolist()
    assert expected[3] < expected[0]
    for losses, steps in zip(results["resharded_transformer"], (4, 4, 2), strict=True):
        assert losses == pytest.approx(expected[:steps], rel=1e-5)
