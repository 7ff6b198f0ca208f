"""`examples.learning.grpo` by hand: plain dicts and modules, the same numbers."""

import copy

import torch
from examples.learning.grpo import (
    ANSWER,
    EPOCHS,
    GROUP,
    HIDDEN,
    LONGEST,
    PAD,
    PROMPTS,
    WORDS,
    Reader,
    loss_of,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.rnn import pad_sequence


class Speaker(nn.Module):
    """A network that says one word after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS + 1, HIDDEN)
        self.memory = nn.GRUCell(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, word: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next state and the logits of the next word."""
        state = self.memory(self.embedding(word), state)
        return state, self.head(state)


def draw_prompts() -> dict[str, Tensor]:
    """Return prompts of random words and lengths, each repeated for its group."""
    lengths = torch.randint(1, LONGEST + 1, (PROMPTS,)).tolist()
    prompts = [torch.randint(WORDS, (n,)) for n in lengths]
    first = torch.stack([words[0] for words in prompts])
    padded = pad_sequence(prompts, batch_first=True, padding_side="left", padding_value=PAD)
    rows = torch.arange(PROMPTS).repeat_interleave(GROUP)
    return {"words": padded[rows], "first": first[rows]}


@torch.no_grad()
def answer(rows: dict[str, Tensor], reader: nn.Module, speaker: nn.Module) -> None:
    """Write `answer`, `log_prob` and `advantage` into prompts."""
    state = reader(rows["words"])
    word = torch.full((len(state),), PAD)
    words, log_probs = [], []
    for _ in range(ANSWER):
        state, logits = speaker(word, state)
        choice = Categorical(logits=logits)
        word = choice.sample()
        words.append(word)
        log_probs.append(choice.log_prob(word))
    rows["answer"], rows["log_prob"] = torch.stack(words, 1), torch.stack(log_probs, 1)
    rows["reward"] = (rows["answer"] == rows["first"][:, None]).float().mean(1)
    groups = rows["reward"].unflatten(0, (PROMPTS, GROUP))
    spread = groups.std(1, keepdim=True) + 1e-4
    rows["advantage"] = ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


def score(rows: dict[str, Tensor], reader: nn.Module, speaker: nn.Module) -> Tensor:
    """Return the log-probability of each word of the answers, shape `(rows, ANSWER)`."""
    state = reader(rows["words"])
    word = torch.full((len(state),), PAD)
    log_probs = []
    for following in rows["answer"].unbind(1):
        state, logits = speaker(word, state)
        log_probs.append(Categorical(logits=logits).log_prob(following))
        word = following
    return torch.stack(log_probs, 1)


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a reader and a speaker from seed 0; return both and the history."""
    torch.manual_seed(0)
    reader, speaker = Reader(), Speaker()
    agent = nn.ModuleList([reader, speaker])
    first_reader, first_speaker = copy.deepcopy(agent)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"reward": [], "loss": []}
    for _ in range(iterations):
        rows = draw_prompts()
        answer(rows, reader, speaker)
        with torch.no_grad():
            reference = score(rows, first_reader, first_speaker)
        for _ in range(EPOCHS):
            loss = loss_of(rows, score(rows, reader, speaker), reference)  # type: ignore[arg-type]  # a dict has the same entries
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history["reward"].append(rows["reward"].mean().item())
        history["loss"].append(loss.item())
    return agent, history
