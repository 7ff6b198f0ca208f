"""GRPO (Shao et al. 2024) teaches a small language model to answer prompts of any length.

    python examples/learning/grpo.py

The right answer repeats the first word of the prompt. Prompts of different lengths are one lazy
stack, which pads them when they are read; a group is a prompt repeated, and the advantage of an
answer is its reward beside those of its group.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import copy

import torch
from examples.learning.curves import report, told
from torch import Tensor, nn
from torch.distributions import Categorical

from kd_core import TensorDict, TensorDictBase, lazy_stack
from kd_nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from kd_probabilistic import InteractionType, ProbabilisticTensorDictModule

ITERATIONS = 120
WORDS, LONGEST, ANSWER = 8, 6, 3
PROMPTS, GROUP, EPOCHS = 16, 16, 2
CLIP, REFERENCE_WEIGHT = 0.2, 0.02
PAD = WORDS
HIDDEN = 48


class Reader(nn.Module):
    """A network that reads a prompt of words, shape `(batch, length)`, into a state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS + 1, HIDDEN)
        self.memory = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """Return the state after the last word, shape `(batch, HIDDEN)`."""
        _, state = self.memory(self.embedding(words))
        return state[0]


def build_reader() -> TensorDictModule:
    """Build `words -> state`."""
    return TensorDictModule(Reader(), in_keys=["words"], out_keys=["state"])


def build_speaker() -> TensorDictSequential:
    """Build `word, state -> state, logits`."""
    return TensorDictSequential(
        TensorDictModule(nn.Embedding(WORDS + 1, HIDDEN), in_keys=["word"], out_keys=["heard"]),
        TensorDictModule(nn.GRUCell(HIDDEN, HIDDEN), ["heard", "state"], ["state"]),
        TensorDictModule(nn.Linear(HIDDEN, WORDS), in_keys=["state"], out_keys=["logits"]),
    )


def build_choice() -> ProbabilisticTensorDictModule:
    """Build `logits -> word, word_log_prob`."""
    return ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["word"],
        distribution_class=Categorical,
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )


def draw_prompts() -> TensorDict:
    """Return prompts of random words and lengths, each repeated for its group."""
    lengths = torch.randint(1, LONGEST + 1, (PROMPTS,)).tolist()
    prompts = lazy_stack([TensorDict({"words": torch.randint(WORDS, (n,))}) for n in lengths])
    first = torch.stack([words[0] for words in prompts.get("words", as_list=True)])
    padded = prompts.get("words", as_padded_tensor=True, padding_side="left", padding_value=PAD)
    rows = torch.arange(PROMPTS).repeat_interleave(GROUP)
    return TensorDict({"words": padded, "first": first}, [PROMPTS])[rows]


def opening(rows: TensorDictBase, reader: TensorDictModuleBase) -> TensorDict:
    """Return the state before the first word of the answers."""
    state = reader(rows.select("words"))["state"]
    return TensorDict({"word": torch.full((len(rows),), PAD), "state": state}, [len(rows)])


@torch.no_grad()
def answer(
    rows: TensorDictBase,
    reader: TensorDictModuleBase,
    speaker: TensorDictModuleBase,
    choice: TensorDictModuleBase,
) -> None:
    """Write `answer`, `log_prob` and `advantage` into prompts."""
    now = opening(rows, reader)
    words, log_probs = [], []
    for _ in range(ANSWER):
        now = choice(speaker(now))
        words.append(now["word"])
        log_probs.append(now["word_log_prob"])
    rows["answer"], rows["log_prob"] = torch.stack(words, 1), torch.stack(log_probs, 1)
    rows["reward"] = (rows["answer"] == rows["first"][:, None]).float().mean(1)
    groups = rows["reward"].unflatten(0, (PROMPTS, GROUP))
    spread = groups.std(1, keepdim=True) + 1e-4
    rows["advantage"] = ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


def score(
    rows: TensorDictBase, reader: TensorDictModuleBase, speaker: TensorDictModuleBase
) -> Tensor:
    """Return the log-probability of each word of the answers, shape `(rows, ANSWER)`."""
    now = opening(rows, reader)
    log_probs = []
    for word in rows["answer"].unbind(1):
        now = speaker(now)
        log_probs.append(Categorical(logits=now["logits"]).log_prob(word))
        now["word"] = word
    return torch.stack(log_probs, 1)


def loss_of(rows: TensorDictBase, log_prob: Tensor, reference: Tensor) -> Tensor:
    """Return the clipped loss, with the distance from the reference, a scalar."""
    ratio = (log_prob - rows["log_prob"]).exp()
    advantage = rows["advantage"][:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    apart = reference - log_prob
    return (REFERENCE_WEIGHT * (apart.exp() - apart - 1) - gain).mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a reader and a speaker from seed 0.

    Returns:
        Both, and the history of the iterations: `reward`, the share of right words, and `loss`.
    """
    torch.manual_seed(0)
    reader, speaker, choice = build_reader(), build_speaker(), build_choice()
    agent = nn.ModuleList([reader, speaker])
    first_reader, first_speaker = copy.deepcopy(reader), copy.deepcopy(speaker)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"reward": [], "loss": []}
    for _ in range(iterations):
        rows = draw_prompts()
        answer(rows, reader, speaker, choice)
        with torch.no_grad():
            reference = score(rows, first_reader, first_speaker)
        for _ in range(EPOCHS):
            loss = loss_of(rows, score(rows, reader, speaker), reference)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history["reward"].append(rows["reward"].mean().item())
        history["loss"].append(loss.item())
    return agent, history


if __name__ == "__main__":
    with told(__doc__, "20 s"):
        report("grpo", "GRPO answers prompts", train(ITERATIONS)[1], limit=("reward", 1))
