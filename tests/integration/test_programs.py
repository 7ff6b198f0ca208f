"""Each program of `examples/learning` computes what its hand-written twin computes."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from benchmarks.programs.compiled import Counting, Outcome, Timed, fault_of, is_close, outcome
from examples.learning import curves

# How many iterations prove it: all code of a program runs, and parameters have changed.
PROGRAMS = {
    "ppo": 1,
    "sac": 1,
    "world_model": 1,
    "grpo": 2,
    "dqn": 1,
    "vae": 1,
    "team": 2,
    "evolution": 1,
    "decisions": 1,
    "graphs": 1,
    "bayes": 1,
    "table": 1,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_plain_dicts(name: str) -> None:
    example = importlib.import_module(f"examples.learning.{name}")
    by_hand = importlib.import_module(f"benchmarks.programs.{name}")
    agent, history = example.train(PROGRAMS[name])
    expected_agent, expected_history = by_hand.train(PROGRAMS[name])
    assert history == expected_history
    pairs = list(zip(agent.parameters(), expected_agent.parameters(), strict=True))
    assert pairs
    assert all(torch.equal(mine, expected) for mine, expected in pairs)


# Those that compile in less than a second; `python -m benchmarks.programs.compiled` runs all.
# dynamo reads the gradient of its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["ppo", "dqn", "vae", "team", "graphs", "table"])
def test_a_compiled_step_is_one_graph(name: str) -> None:
    found = outcome(importlib.import_module(f"examples.learning.{name}"), name)
    assert fault_of(name, found) == ""
    torch._dynamo.reset()


def test_calls_that_compile_do_not_count_as_further_calls() -> None:
    call = Timed(lambda x: x + 1, Counting("eager", None))
    for x in (torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3)):
        call(x)
    assert call.first > 0
    assert len(call.following) == 2
    torch._dynamo.reset()


def test_a_program_that_is_compiled_again_or_computes_something_else_is_told() -> None:
    assert fault_of("vae", Outcome(0, 0, {"loss_of": 1}, True)) == ""
    assert fault_of("vae", Outcome(0, 0, {"loss_of": 2}, True)) == "loss_of WAS COMPILED AGAIN"
    assert fault_of("team", Outcome(0, 0, {"loss_of": 2}, False)) == "OTHER NUMBERS"
    assert is_close({"loss": [1.0, 2.0]}, {"loss": [1.0005, 2.0]})
    assert not is_close({"loss": [1.0, 2.0]}, {"loss": [1.0, 2.01]})
    assert not is_close({"loss": [1.0]}, {"loss": [math.nan]})


def test_a_history_of_one_figure_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curves, "OUT", tmp_path)
    with curves.told("Learns nothing.\n\nMore.", "1 s"):
        curves.report("one", "A curve", {"loss": [3.0, 1.0]})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Learns nothing. Takes about 1 s."
    assert said[1:3] == ["loss: from 3 to 1", f"wrote {tmp_path / 'one'}.svg"]
    assert said[3].startswith("took ")
    assert "A curve" in (tmp_path / "one.svg").read_text()
