"""TorchRL tunes tiny language models: a reward model, PPO on rollouts, SFT and GRPO on chats."""

import tempfile
from functools import cache
from pathlib import Path

import tensordict
import torch
from measured import Numbers, content, fingerprint, main, results
from tensordict import TensorDict, lazy_stack
from tensordict.nn import (
    TensorDictModule,
)
from tokenizers import Tokenizer, decoders, models
from torchrl.collectors.llm import LLMCollector
from torchrl.data import (
    LazyStackStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.data.llm import (
    AdaptiveKLController,
    History,
    PairwiseDataset,
    PromptData,
    PromptTensorDictTokenizer,
    RewardData,
    RolloutFromModel,
    TensorDictTokenizer,
    TokenizedDatasetLoader,
    TopKRewardSelector,
    create_infinite_iterator,
)
from torchrl.data.llm.history import _CHAT_TEMPLATES
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv, RetrieveLogProb
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.envs.transforms import Transform
from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.models.llm import GPT2RewardModel
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.llm import MCAdvantage, SFTLoss
from torchrl.objectives.value import GAE
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)

tensordict.set_list_to_stack(True).set()
EOS = 50256
SUMMARIES = [
    ("a b c", "good a", "bad b h"),
    ("d e", "good d e f", "bad"),
    ("f g h a", "good", "bad c d e"),
    ("b c", "good b", "bad a"),
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters."""
    letters = ["\n", *(chr(each) for each in range(32, 127))]
    special = ["<|im_start|>", "<|im_end|>"]
    words = {word: number for number, word in enumerate(["<unk>", *special, *letters])}
    words["<eos>"] = EOS
    inner = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = _CHAT_TEMPLATES["chatml_format"]
    return made


def model() -> GPT2LMHeadModel:
    """Return a tiny language model."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=EOS + 1,
        n_embd=8,
        n_layer=1,
        n_head=1,
        n_positions=512,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def chatting() -> OPTForCausalLM:
    """Return a tiny language model for chats."""
    torch.manual_seed(2)
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=EOS + 1,
            hidden_size=8,
            num_hidden_layers=1,
            ffn_dim=16,
            num_attention_heads=1,
            max_position_embeddings=512,
            word_embed_proj_dim=8,
            dropout=0.0,
            pad_token_id=EOS,
            bos_token_id=EOS,
            eos_token_id=EOS,
        )
    )


def pairs(folder: str) -> PairwiseDataset:
    """Return chosen and rejected texts as memory maps, as the data sets of the library are."""
    found = {}
    tokens = TensorDictTokenizer(tokenizer(), max_length=24)
    for name, column in (("chosen", 1), ("rejected", 2)):
        td = tokens({"text": [f"{row[0]} {row[column]}" for row in SUMMARIES]})
        made = TokenizedDatasetLoader.dataset_to_tensordict(
            td, data_dir=Path(folder), prefix=(name, "24")
        )
        again = TensorDict.load_memmap(Path(folder))[name, "24"]
        assert (again == made[name, "24"]).all()
        found[name] = RewardData(**again, batch_size=again.shape)
    return PairwiseDataset(
        chosen_data=found["chosen"], rejected_data=found["rejected"], batch_size=[len(SUMMARIES)]
    )


def reward() -> object:
    """Train a reward model on pairs."""
    with tempfile.TemporaryDirectory() as folder:
        model().save_pretrained(folder + "/model")
        data = pairs(folder)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(len(data)),
            sampler=SamplerWithoutReplacement(drop_last=True),
            batch_size=2,
        )
        buffer.extend(data)
        net = TensorDictModule(
            GPT2RewardModel(folder + "/model", pad_token_id=EOS),
            in_keys=["input_ids", "attention_mask"],
            out_keys=["rewards", "end_scores"],
        )
        optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3)
        endless = create_infinite_iterator(buffer)
        losses, right = [], []
        for _ in range(6):
            batch = next(endless)
            net(batch.chosen_data)
            net(batch.rejected_data)
            loss = net.compute_reward_loss(batch.chosen_data, batch.rejected_data)
            right.append((batch.chosen_data.end_scores > batch.rejected_data.end_scores).sum())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            losses.append(loss.item())
        return [losses, content(torch.stack(right)), content(batch), content(data)]


def prompts() -> PromptData:
    """Return prompts with the place where each ends."""
    tokens = PromptTensorDictTokenizer(
        tokenizer(), max_length=24, key="prompt", padding="max_length"
    )
    td = tokens(
        {
            "prompt": [row[0] for row in SUMMARIES],
            "label": [row[1] for row in SUMMARIES],
        }
    )
    return PromptData(
        **td.select("input_ids", "attention_mask", "prompt_rindex"),
        labels=td["input_ids"],
        batch_size=td.shape,
    )


class Trunk(torch.nn.Module):
    """The hidden states of a language model at the last token."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return them."""
        shape = input_ids.shape[:-1]
        ids, mask = input_ids.flatten(0, -2), attention_mask.flatten(0, -2)
        hidden = self.net(input_ids=ids, attention_mask=mask)[0]
        last = mask.sum(-1).clamp_min(1) - 1
        return hidden[torch.arange(len(ids)), last].unflatten(0, shape)


def ppo() -> object:
    """Tune a model by PPO on what it generates."""
    batch = prompts()
    net, ref = model(), model().eval().requires_grad_(False)
    scores = Scores(ref)
    rollouts = RolloutFromModel(
        net,
        ref,
        scores,
        max_new_tokens=4,
        kl_scheduler=AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=100),
    )
    common = TensorDictModule(
        Trunk(net.transformer), in_keys=["input_ids", "attention_mask"], out_keys=["x"]
    )
    head = ProbabilisticActor(
        TensorDictModule(net.lm_head, in_keys=["x"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        log_prob_key="sample_log_prob",
    )
    both = ActorValueOperator(
        common,
        head,
        ValueOperator(torch.nn.Linear(8, 1), in_keys=["x"]),
    )
    advantage = GAE(
        value_network=both.get_value_operator(),
        gamma=0.99,
        lmbda=0.95,
        average_gae=True,
        shifted=True,
    )
    loss = ClipPPOLoss(both.get_policy_operator(), both.get_value_head(), entropy_coeff=0.0)
    loss.set_keys(sample_log_prob="sample_log_prob")
    optimiser = torch.optim.AdamW(list(both.parameters()), lr=1e-3)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(64),
        batch_size=2,
        sampler=SamplerWithoutReplacement(),
    )
    seen = []
    for _ in range(2):
        td = rollouts.rollout_from_data(batch)
        with torch.no_grad():
            advantage(td)
        buffer.extend(td)
        for mini in buffer:
            flat = mini.reshape(-1)
            terms = loss(flat)
            value = terms["loss_critic"] + terms["loss_objective"]
            value.backward()
            optimiser.step()
            optimiser.zero_grad()
            seen.append(value.item())
        rollouts.step_scheduler()
    return [seen, rollouts.kl_coef, content(td), str(td.names), fingerprint(both)]


class Scores(torch.nn.Module):
    """Scores of texts from a frozen model."""

    def __init__(self, net: GPT2LMHeadModel) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a score of each token and of the text."""
        hidden = self.net.transformer(input_ids=input_ids, attention_mask=attention_mask)[0]
        tokens = hidden.mean(-1)
        return tokens, tokens.sum(-1)


CHATS = [
    [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "good a b"},
        {"role": "user", "content": "how are you"},
        {"role": "assistant", "content": "good good"},
    ],
    [
        {"role": "user", "content": "a b c"},
        {"role": "assistant", "content": "d e f"},
        {"role": "user", "content": "are you bad"},
        {"role": "assistant", "content": "how bad are you there"},
    ],
]


def wrapper(net: OPTForCausalLM, **options: object) -> TransformersWrapper:
    """Return a model as a policy of texts."""
    return TransformersWrapper(net, tokenizer=tokenizer(), input_mode="history", **options)


def sft() -> object:
    """Tune a model on chats, near a reference."""
    history = History.from_chats(CHATS)
    train_policy = wrapper(
        chatting(),
        generate=False,
        return_log_probs=True,
        chat_template_name="chatml_format",
        pad_output=False,
    )
    ref = wrapper(
        chatting(),
        generate=False,
        return_log_probs=True,
        chat_template_name="chatml_format",
        pad_output=False,
        log_probs_key="ref_log_probs",
    )
    transform = RetrieveLogProb(
        ref,
        log_probs_full_key=("ref_log_probs", "full"),
        assistant_only=True,
        tokenizer_kwargs={"chat_template_name": "chatml_format"},
        tokenizer=tokenizer(),
    )
    text = history[:, :-1].apply_chat_template(
        tokenizer=tokenizer(), chat_template_name="chatml_format", add_generation_prompt=True
    )
    response = history[:, -1].apply_chat_template(
        tokenizer=tokenizer(), chat_template_name="chatml_format", add_generation_prompt=False
    )
    from torchrl.modules.llm.policies import ChatHistory

    td = TensorDict(
        text=text,
        text_response=response,
        history=ChatHistory(full=history),
        next=TensorDict(
            reward=torch.randn(2, 1),
            done=torch.zeros(2, dtype=torch.bool),
            history=ChatHistory(prompt=history),
        ),
        batch_size=(2,),
    )
    data = lazy_stack(list(td.unbind(0)))
    data = transform(data)
    loss = SFTLoss(
        actor_network=train_policy,
        tokenizer=tokenizer(),
        reduction="mean",
        normalize_by_seq_length=True,
        kl_to_ref_coeff=0.1,
        tokenizer_kwargs={"chat_template_name": "chatml_format"},
    )
    optimiser = torch.optim.Adam(loss.parameters(), 1e-3)
    seen = []
    for _ in range(2):
        terms = loss(data.clone())
        terms.sum(reduce=True).backward(retain_graph=True)
        optimiser.step()
        optimiser.zero_grad()
        seen.append(content(terms))
    return [
        seen,
        text,
        fingerprint(train_policy),
        content(data.get(("next", "ref_log_probs", "full"), as_list=True)),
    ]


class Length(Transform):
    """A reward for the number of words."""

    def __init__(self) -> None:
        super().__init__(in_keys=[("history", "full")], out_keys=["reward"])

    def _step(self, tensordict: TensorDict, next_tensordict: TensorDict) -> TensorDict:
        texts = tensordict["text"].response or []
        rewards = torch.zeros(*tensordict.batch_size, 1, 1)
        for row, text in enumerate(texts):
            rewards[row] = len(text or "")
        next_tensordict["reward"] = rewards
        return next_tensordict

    def transform_reward_spec(self, reward_spec: object) -> object:
        """Add the reward."""
        from torchrl.data import Unbounded

        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


def grpo() -> object:
    """Tune a model by GRPO on chats from a loader."""
    loader = [{"query": text} for text in ["hello there"] * 2 + ["how are you"] * 2] * 8
    net = chatting()
    env = ChatEnv.from_dataloader(
        dataloader=loader,
        repeats=1,
        batch_size=(4,),
        tokenizer=tokenizer(),
        input_mode="history",
        group_repeats=True,
        system_prompt="you are good",
    )
    env = env.append_transform(Length()).append_transform(StepCounter(max_steps=1))
    policy = wrapper(
        net,
        generate=True,
        return_log_probs=True,
        pad_output=False,
        generate_kwargs={"max_new_tokens": 6, "do_sample": True, "temperature": 1.0},
    )
    collector = LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=4,
        total_dialog_turns=16,
        flatten_data=True,
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
        transform=MCAdvantage(grpo_size=2, prompt_key="query"),
    )
    trained = wrapper(net, generate=False, return_log_probs=True, pad_output=False)
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    seen = []
    for data in collector:
        buffer.extend(data)
        if len(buffer) < 4:
            continue
        batch = buffer.sample(4)
        again = trained(batch.select(("history", "full")))
        found = again.get(("log_probs", "full"), as_list=True)
        gains = batch.get("advantage", as_list=True)
        value = -sum((row.sum() * gain.sum()) for row, gain in zip(found, gains, strict=True))
        value.backward()
        optimiser.step()
        optimiser.zero_grad()
        seen.append([value.item(), content(gains), sorted(map(str, batch.keys(True, True)))])
    return [seen, fingerprint(net)]


def chat() -> object:
    """Talk to an environment for two turns."""
    env = ChatEnv(batch_size=(1,), tokenizer=tokenizer(), system_prompt="you are good")
    env = TransformedEnv(env, Length())
    policy = wrapper(
        chatting(),
        generate=True,
        return_log_probs=True,
        pad_output=False,
        generate_kwargs={"max_new_tokens": 5, "do_sample": False},
    )
    start = env.reset(TensorDict(query=["hello there"], batch_size=(1,)))
    first = start.clone()
    following = env.step(policy(start))
    again = env.step(policy(following["next"]))
    return [content(first), content(following), content(again), sorted(again["next"].keys())]


def topk() -> object:
    """Keep the best of each prompt."""
    buffer = ReplayBuffer(
        storage=LazyStackStorage(50), sampler=SamplerWithoutReplacement, batch_size=5
    )
    data = lazy_stack(
        [
            TensorDict(
                {
                    ("next", "done"): torch.full((1, 1), True),
                    ("next", "reward"): torch.full((i + 5, 1), float(i)),
                    "text": f"Prompt {i // 5}",
                }
            )
            for i in range(50)
        ]
    )
    buffer.append_transform(
        TopKRewardSelector(total_dialog_turns=5, topk_size=3, prompt_key="text")
    )
    for rows in data.chunk(25):
        buffer.extend(rows)
    padded = buffer[:3].get(("next", "reward"), as_padded_tensor=True)
    return [
        buffer.write_count,
        len(buffer),
        content(padded),
        [content(row) for row in buffer[:4].unbind(0)],
    ]


def loading() -> object:
    """Prime an environment with prompts of a loader."""
    primer = DataLoadingPrimer(dataloader=[{"query": "a"}, {"query": "b"}], batch_size=())
    return [content(primer.reset_dataloader()), content(primer._load_from_dataloader())]


def train() -> Numbers:
    """Tune by each."""
    return results(
        {
            "reward": reward,
            "ppo": ppo,
            "sft": sft,
            "grpo": grpo,
            "chat": chat,
            "topk": topk,
            "loading": loading,
        }
    )


if __name__ == "__main__":
    main(train)
