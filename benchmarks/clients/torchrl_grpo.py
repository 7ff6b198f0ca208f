"""TorchRL's losses of language models and what feeds them, on a tiny model with random weights."""

from collections.abc import Callable
from functools import cache

import tensordict
import torch
from measured import Numbers, content, main, results
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._pytree import tree_map
from torchrl.data import LazyMemmapStorage, LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.data.vla import RobotDatasetMetadata
from torchrl.envs import LLMHashingEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import MCPToolTransform
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory, Masks, Text, Tokens
from torchrl.objectives.llm import DAPO, CISPOLoss, GRPOLoss, MCAdvantage, SFTLoss
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

tensordict.set_list_to_stack(True).set()
WORDS = "<pad> <eos> <unk> system user assistant hello world what is one two plus answer :".split()  # noqa: SIM905  # reads better
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {% generation %}{{ m['content'] }}"
    "{% endgeneration %} <eos> {% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)
TOOL = '<tool>python.run_python_code\n{"python_code": "1 + 1"}</tool>'


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words and of letters."""
    words = [*WORDS, *(chr(each) for each in range(33, 127))]
    known = {word: number for number, word in enumerate(dict.fromkeys(words))}
    inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template, made.padding_side = TEMPLATE, "left"
    return made


@cache
def model() -> Qwen2ForCausalLM:
    """Return a tiny language model."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return Qwen2ForCausalLM(config).eval()


def policy(mode: str = "history", generates: bool = False, pads: bool = False) -> object:
    """Return the policy of the model."""
    greedy = {"max_new_tokens": 5, "do_sample": False, "temperature": 0.0}
    return TransformersWrapper(
        model(),
        tokenizer=tokenizer(),
        input_mode=mode,
        generate=generates,
        return_log_probs=True,
        pad_output=pads,
        generate_kwargs=greedy if generates else None,
    )


def chats() -> TensorDict:
    """Return chats of several lengths."""
    pairs = (("what is", "one"), ("what is one p", "two"), ("what is one plus t", "answer"))
    roles = ("user", "assistant")
    rows = [[{"role": r, "content": c} for r, c in zip(roles, p, strict=True)] for p in pairs]
    return TensorDict(history=ChatHistory(full=History.from_chats(rows)), batch_size=(3,))


def scored(pads: bool) -> Callable[[], object]:
    """Return a case: the log-probabilities of what chats say."""
    return lambda: [content(row) for row in policy(pads=pads)(chats()).unbind(0)]


def generated(mode: str) -> Callable[[], object]:
    """Return a case: what the model says."""

    def case() -> object:
        texts = ["hello world", "what is one", "answer :"]
        if mode == "text":
            td = TensorDict(text=Text(prompt=texts), batch_size=(3,))
        else:
            found = tokenizer()(texts, padding=True, return_tensors="pt")
            mask = Masks(all_attention_mask=found.attention_mask.bool(), all_assistant_mask=None)
            td = TensorDict(tokens=Tokens(prompt=found.input_ids), masks=mask, batch_size=(3,))
        return [content(row) for row in policy(mode, generates=True)(td).unbind(0)]

    return case


def gradients() -> float:
    """Return the sum of all gradients of the model, and forget them."""
    total = sum(float(p.grad.abs().sum()) for p in model().parameters() if p.grad is not None)
    model().zero_grad()
    return round(total, 3)


def loss(kind: type, pads: bool = False, **options: object) -> Callable[[], object]:
    """Return a case: a loss of the policy, its parts and its gradients."""

    def case() -> object:
        with torch.no_grad():
            rows = policy(pads=pads)(chats()).unbind(0)
        for row in rows:
            row["advantage"] = torch.randn(*row["log_probs", "full"].shape, 1)
        out = kind(policy(pads=pads), **options)(lazy_stack(list(rows)))
        (out.loss_objective + out.loss_entropy).mean().backward()
        found = {name: getattr(out, name) for name in ("loss_objective", "entropy", "ESS")}
        return [content(found), type(out).__name__, gradients()]

    return case


def sft() -> object:
    """Fine-tune on chats."""
    out = SFTLoss(policy(), tokenizer=tokenizer())(chats())
    out.loss_sft.mean().backward()
    return [content(out.loss_sft), gradients()]


def advantages() -> object:
    """Compare answers to one prompt with each other, in a buffer."""
    buffer = ReplayBuffer(storage=LazyStackStorage(20))
    buffer.append_transform(MCAdvantage(grpo_size=2, prompt_key=("text", "prompt")))
    done = torch.ones(1, dtype=torch.bool)
    ends = {"done": done, "terminated": done.clone()}
    for i in range(4):
        step = TensorDict(reward=torch.full((1,), float(i)), **ends)
        buffer.extend(lazy_stack([TensorDict(text=Text(prompt=f"p{i // 2}"), next=step)]))
    return [len(buffer), content(buffer[:])]


def hashing() -> object:
    """Take a step in an environment of hashed texts."""
    env = LLMHashingEnv(tokenizer=tokenizer(), vocab_size=len(tokenizer()))
    td = env.reset(TensorDict(observation=torch.tensor([[3, 4, 5]]), batch_size=[1]))
    td["action"] = torch.tensor([[8]])
    td = env.step(td)
    return [content(td), content(td["next"])]


def tools() -> object:
    """Call a tool of a server that is not there."""
    env = ChatEnv(batch_size=(1,)).append_transform(MCPToolTransform(servers={}))
    td = env.reset(TensorDict(query="You are useful", batch_size=(1,)))
    history = td.get("history")
    response = History(role="assistant", content=TOOL).unsqueeze(0).unsqueeze(0)
    history.full = history.prompt.extend(response, inplace=True, dim=-1)
    history.response = response
    found = env.step(td.set("history", history))["next", "history", "prompt"]
    return [list(found.batch_size), list(found[..., -1].content)]


def any_keys() -> object:
    """Put a tree with a number as a key through the transforms of a buffer."""
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(10), transform=lambda x: tree_map(torch.zeros_like, x)
    )
    number = buffer.add({"a": torch.ones(3), "b": {"c": (torch.ones(2),)}, 30: torch.ones(())})
    return [number, content(buffer.sample(2))]


def metadata() -> object:
    """Write metadata of a robot as JSON, read it, and compare."""
    options = {"action_space": "eef_delta", "gripper_mode": "binary"}
    meta = RobotDatasetMetadata("bridge", action_dim=2, action_mean=torch.zeros(2), **options)
    return bool((RobotDatasetMetadata.from_json(meta.to_json()) == meta).all())


def train() -> Numbers:
    """Run each case."""
    generic = {"masking_strategy": "generic"}
    return results(
        {
            "scored": scored(pads=False),
            "scored, padded": scored(pads=True),
            "generated text": generated("text"),
            "generated tokens": generated("tokens"),
            "grpo": loss(GRPOLoss),
            "grpo rlhf": loss(GRPOLoss, masking_strategy="rlhf"),
            "grpo generic": loss(GRPOLoss, **generic),
            "grpo padded": loss(GRPOLoss, pads=True, **generic),
            "grpo kl": loss(GRPOLoss, kl_to_inference_coeff=0.1, **generic),
            "cispo": loss(CISPOLoss, **generic),
            "dapo": loss(DAPO, **generic),
            "sft": sft,
            "advantages": advantages,
            "hashing": hashing,
            "tools": tools,
            "any keys": any_keys,
            "metadata": metadata,
        }
    )


if __name__ == "__main__":
    main(train)
