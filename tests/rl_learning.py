"""GRPO and PPO in one process: a tiny transformer on the built-in task, with all of `refit_transport.rl`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import nn

from refit_transport.rl.advantages import GaeSettings, GroupSettings, with_gae, with_group_advantages
from refit_transport.rl.policy_loss import loss_counts, policy_loss
from refit_transport.rl.replay_buffer import ReplayBuffer
from refit_transport.rl.settings import ImportanceSettings, PolicyLossSettings, ValueLossSettings
from refit_transport.rl.tasks import FirstDigitEcho
from refit_transport.rl.trajectories import Rollout, Sample, TrainBatch, prompt_groups, split_evenly
from refit_transport.rl.value_loss import value_loss

PLAIN = PolicyLossSettings()
ONE_STEP_OFF = PolicyLossSettings(importance=ImportanceSettings("tis", 2.0))
HIDDEN, HEADS, LAYERS, LONGEST = 64, 4, 2, 14


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class TinyModel(nn.Module):
    """Logits of the next token, or with `outputs=1` the value of each state."""

    def __init__(self, outputs: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(FirstDigitEcho.VOCAB_SIZE, HIDDEN), nn.Embedding(LONGEST, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, outputs, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if outputs > 1 else 0.02 * (parameter.shape[0] > 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def sampled(model: TinyModel, task: FirstDigitEcho, *, step: int, version: int, prompts: int, repeats: int) -> Rollout:
    generator = torch.Generator().manual_seed(step)
    asked = task.prompts(step=step, count=prompts, seed=0)
    tokens = torch.tensor(asked).repeat_interleave(repeats, 0)
    start = tokens.shape[1]
    logprobs = []
    for _ in range(task.response_length):
        distribution = model(tokens)[:, -1].log_softmax(-1)
        chosen = torch.multinomial(distribution.exp(), 1, generator=generator)
        logprobs.append(distribution.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    responses, scores = tokens[:, start:].tolist(), torch.cat(logprobs, 1).tolist()
    samples = []
    for row, (response, score) in enumerate(zip(responses, scores, strict=True)):
        end = response.index(task.EOS) + 1 if task.EOS in response else len(response)
        samples.append(
            Sample(
                prompt=asked[row // repeats],
                response=tuple(response[:end]),
                generation_logprobs=tuple(score[:end]),
                versions=(version,) * end,
                seed=step,
                group=row // repeats,
                finished="stop" if response[end - 1] == task.EOS else "length",
            )
        )
    return Rollout(tuple(samples), tuple(task.reward(sample.prompt, sample.response) for sample in samples))


@dataclass
class Learner:
    """A policy and what it needs to be updated once per rollout."""

    policy: TinyModel
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, outputs: int, seed: int) -> Learner:
        model = TinyModel(outputs, seed)
        return cls(model, torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0))

    def step(self, loss_of: Callable[[TrainBatch], torch.Tensor], batch: TrainBatch, *, micro_batches: int) -> None:
        self.optimizer.zero_grad()
        for part in split_evenly(batch, micro_batches):
            loss_of(part).backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()


@torch.no_grad()
def batch_of(learner: Learner, rollout: Rollout) -> TrainBatch:
    batch = TrainBatch.from_samples(rollout.samples)
    return replace(batch, prev_logprobs=learner.policy.logprobs(batch.tokens))


def update_policy(learner: Learner, batch: TrainBatch, settings: PolicyLossSettings) -> None:
    counts = loss_counts(batch)
    learner.step(
        lambda part: policy_loss(learner.policy.logprobs(part.tokens), part, settings, counts).loss,
        batch,
        micro_batches=2,
    )


def grpo(*, steps: int, seed: int, lag: int = 0, settings: PolicyLossSettings = PLAIN) -> list[float]:
    """Mean reward of each step; the sampler's weights are `lag` steps old."""
    task, learner, rewards = FirstDigitEcho(), Learner.of(FirstDigitEcho.VOCAB_SIZE, seed), []
    buffer = ReplayBuffer(max_age=lag)
    waiting: deque[Rollout] = deque()
    for step in range(steps):
        waiting.append(sampled(learner.policy, task, step=step, version=step, prompts=32, repeats=16))
        rewards.append(waiting[-1].mean_reward())
        if len(waiting) <= lag:
            continue
        buffer.add(waiting.popleft())
        rollout = buffer.take(32, version=step).rollout
        assert rollout is not None
        batch = batch_of(learner, rollout)
        groups = prompt_groups(rollout.samples)
        settled = with_group_advantages(batch, rollout.rewards, groups, GroupSettings(use_leave_one_out_baseline=False))
        update_policy(learner, settled, settings)
    return rewards


def ppo(*, steps: int, seed: int) -> list[float]:
    """Mean reward of each step."""
    task, rewards = FirstDigitEcho(), []
    learner, critic = Learner.of(FirstDigitEcho.VOCAB_SIZE, seed), Learner.of(1, seed + 100)
    for step in range(steps):
        rollout = sampled(learner.policy, task, step=step, version=step, prompts=512, repeats=1)
        rewards.append(rollout.mean_reward())
        batch = batch_of(learner, rollout)
        with torch.no_grad():
            batch = replace(batch, values=critic.policy(batch.tokens[:, :-1])[..., 0])
        batch = with_gae(batch, rollout.rewards, GaeSettings())
        counts = loss_counts(batch)

        def critic_loss(part: TrainBatch, counts: object = counts) -> torch.Tensor:
            values = critic.policy(part.tokens[:, :-1])[..., 0]
            return value_loss(values, part, ValueLossSettings(), counts).loss

        critic.step(critic_loss, batch, micro_batches=2)
        update_policy(learner, batch, PolicyLossSettings())
    return rewards
