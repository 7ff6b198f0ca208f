"""GRPO on three ranks: rank 0 draws ragged prompts, all answer, and rank 0 reads what they said.

    python examples/ranks/grpo.py

Prompts are a lazy stack of members of different lengths, each with its text. `chunk` divides it, a
share goes to each rank as it is, and the answers come back with their texts.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.curves import report, told
from examples.learning.grpo import (
    EPOCHS,
    GROUP,
    LONGEST,
    PAD,
    PROMPTS,
    WORDS,
    answer,
    build_choice,
    build_reader,
    build_speaker,
    loss_of,
    score,
)
from examples.ranks.shares import SHARES, Shares, run
from torch import nn

from kd_core import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    cat,
    distributed,
    lazy_stack,
)

ITERATIONS = 80


def draw_prompts() -> TensorDictBase:
    """Return prompts for all shares, of random words and lengths, with their texts."""
    lengths = torch.randint(1, LONGEST + 1, (SHARES * PROMPTS,)).tolist()
    drawn = [torch.randint(WORDS, (length,)) for length in lengths]
    return lazy_stack(
        [
            TensorDict({"words": words, "text": " ".join(map(str, words.tolist()))})
            for words in drawn
        ]
    )


def rows_of(prompts: TensorDictBase) -> TensorDict:
    """Return prompts padded to one length, each repeated for its group."""
    assert isinstance(prompts, LazyStackedTensorDict)
    padded = prompts.get("words", as_padded_tensor=True, padding_side="left", padding_value=PAD)
    first = torch.stack([words[0] for words in prompts.get("words", as_list=True)])
    rows = torch.arange(PROMPTS).repeat_interleave(GROUP)
    entries = {"words": padded, "first": first, "text": prompts["text"]}
    return TensorDict(entries, [PROMPTS])[rows]


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]], TensorDictBase | None]:
    """Train a reader and a speaker from seed 0, on the shares of this process.

    Returns:
        Both, the history of the iterations: `reward`, the share of right words, and `loss`; and the
        last answers of all shares, with their texts, where the first share is.
    """
    torch.manual_seed(0)
    reader, speaker, choice = build_reader(), build_speaker(), build_choice()
    agent = nn.ModuleList([reader, speaker])
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    shares = Shares()
    history: dict[str, list[float]] = {"reward": [], "loss": []}
    answers: TensorDictBase | None = None
    for _ in range(iterations):
        parts = None
        if 0 in shares.numbers:
            with shares.random(0):
                parts = draw_prompts().chunk(SHARES)
        own = [distributed.scatter(parts, src=0)] if shares.together else list(parts or ())
        batches = []
        for position, prompts in enumerate(own):
            rows = rows_of(prompts)
            with shares.random(position):
                answer(rows, reader, speaker, choice)
            batches.append(rows)
        for _ in range(EPOCHS):
            last = shares.step(
                agent,
                optimizer,
                batches,
                lambda rows: loss_of(rows, score(rows, reader, speaker), rows["log_prob"]),
            )
        told = [rows.select("text", "answer", "reward") for rows in batches]
        every = distributed.gather(told[0], dst=0) if shares.together else told
        if every is not None:
            answers = cat(every)
            history["reward"].append(answers["reward"].mean().item())
        history["loss"].append(last)
    return agent, history, answers


def main() -> None:
    """Train on the share of this rank; rank 0 prints answers and draws what became of them."""
    _, history, answers = train(ITERATIONS)
    if answers is not None:
        for row in answers[:: len(answers) // 5].unbind(0):
            print(f"{row['text']:12} -> {row['answer'].tolist()}")
        report("grpo_ranks", "GRPO on three ranks answers prompts", history, limit=("reward", 1))


if __name__ == "__main__":
    with told(__doc__, "10 s"):
        run(main)
