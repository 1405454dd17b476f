"""Reinforcement learning in plain torch on a Hugging Face model, one unpadded sequence at a time: the tests' oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_models import load_model

from refit_transport.rl.trajectories import TrainBatch

LEARNING_RATE = 3e-3
# Large, so that an update is no sign function: rounding in tiny gradients must not decide.
EPS = 1e-3
WEIGHT_DECAY = 0.1
BETAS = (0.8, 0.9)
CLIP = 0.05
LOW, HIGH, TRUNCATE, PENALTY = 0.1, 0.15, 1.2, 0.05
VALUE_CLIP, VALUE_SCALE = 0.3, 0.5


@dataclass
class Learned:
    """What some updates gave: per update the loss, entropy and gradient norm; the last gradients and weights."""

    scores: list[np.ndarray] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def make_batch(folder: Path, *, vocab: int, seed: int = 3) -> TrainBatch:
    """Seven samples of different lengths, one of which doesn't count, near enough to the policy for clips to vary."""
    generator = torch.Generator().manual_seed(seed)
    model = load_model(folder)
    lengths = ((3, 9), (5, 4), (2, 10), (6, 6), (4, 1), (3, 7), (1, 11))
    width = max(prompt + response for prompt, response in lengths) - 1
    tokens = torch.zeros(len(lengths), width + 1, dtype=torch.int64)
    mask = torch.zeros(len(lengths), width)
    near = torch.zeros(len(lengths), width)
    for row, (prompt, response) in enumerate(lengths):
        tokens[row, : prompt + response] = torch.randint(0, vocab, (prompt + response,), generator=generator)
        mask[row, prompt - 1 : prompt + response - 1] = 1.0
        near[row, : prompt + response - 1] = _logprobs(model, tokens[row, : prompt + response])[0].detach()

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(near.shape, generator=generator)

    counts = torch.ones(len(lengths))
    counts[3] = 0
    prev = near + noise(0.15)
    return TrainBatch(
        tokens,
        mask,
        counts,
        generation_logprobs=prev + noise(0.2),
        prev_logprobs=prev,
        reference_logprobs=near + noise(0.5),
        advantages=noise(1.0),
        returns=noise(1.0),
        values=noise(0.4),
    )


def learn_policy(folder: Path, batch: TrainBatch, *, steps: int) -> Learned:
    model = load_model(folder)
    found, optimizer = Learned(), _adamw(list(model.parameters()))
    count = float(sum(batch.response_mask[row].sum() for row in range(batch.size) if batch.sample_mask[row]))
    for _ in range(steps):
        optimizer.zero_grad()
        totals = np.zeros(3)
        for row in range(batch.size):
            if not batch.sample_mask[row]:
                continue
            first, last = _span(batch, row)
            logprobs, entropy = _logprobs(model, batch.tokens[row, : last + 2])
            loss = torch.zeros(())
            for place in range(first, last + 1):
                term, decided = _policy_term(logprobs[place], batch, row, place)
                loss = loss + term / count
                totals += (0, float(entropy[place]) / count, decided / count)
            loss.backward()
            totals[0] += float(loss)
        found.losses.append(totals[0])
        found.entropies.append(totals[1])
        found.clipped.append(totals[2])
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    found.gradients = named(model, gradients=True)
    found.weights = named(model, gradients=False)
    return found


def learn_values(folder: Path, batch: TrainBatch, *, steps: int) -> Learned:
    model = load_model(folder)
    trunk = model.model
    head = torch.nn.Parameter(torch.zeros(1, model.config.hidden_size))
    parameters = [*trunk.parameters(), head]
    found, optimizer = Learned(), _adamw(parameters)
    count = float(sum(batch.response_mask[row].sum() for row in range(batch.size) if batch.sample_mask[row]))
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        scores = np.zeros(tuple(batch.response_mask.shape), np.float32)
        for row in range(batch.size):
            first, last = _span(batch, row)
            values = (trunk(batch.tokens[row : row + 1, : last + 1]).last_hidden_state[0] @ head.T)[:, 0]
            scores[row, : last + 1] = values.detach().numpy()
            if not batch.sample_mask[row]:
                continue
            loss = torch.zeros(())
            for place in range(first, last + 1):
                want, before = batch.returns[row, place], batch.values[row, place]
                near = before + torch.clamp(values[place] - before, -VALUE_CLIP, VALUE_CLIP)
                worst = max((values[place] - want) ** 2, (near - want) ** 2, key=float)
                loss = loss + VALUE_SCALE / 2 * worst / count
            loss.backward()
            total += float(loss)
        found.scores.append(scores)
        found.losses.append(total)
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIP)))
        optimizer.step()
    model.lm_head = None
    for gradients, into in ((True, found.gradients), (False, found.weights)):
        into.update({f"model.{name}": value for name, value in named(trunk, gradients=gradients).items()})
        into["value_head.weight"] = (head.grad if gradients else head).detach().numpy().copy()
    return found


def _adamw(parameters: list[Any]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def _span(batch: TrainBatch, row: int) -> tuple[int, int]:
    places = batch.response_mask[row].nonzero()[:, 0]
    return int(places[0]), int(places[-1])


def _logprobs(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token but the first, and the entropy of the distribution that it is drawn from."""
    table = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return table.gather(1, ids[1:, None])[:, 0], -(table.exp() * table).sum(-1)


def _policy_term(logprob: torch.Tensor, batch: TrainBatch, row: int, place: int) -> tuple[torch.Tensor, float]:
    """One token's loss by the case distinction that clipping comes to, and whether the clip decided."""
    prev, sampler = float(batch.prev_logprobs[row, place]), float(batch.generation_logprobs[row, place])
    advantage, reference = float(batch.advantages[row, place]), float(batch.reference_logprobs[row, place])
    ratio = torch.exp(logprob - prev)
    if advantage >= 0:
        decided = float(ratio) > 1 + HIGH
        gain = torch.tensor(advantage * (1 + HIGH)) if decided else advantage * ratio
    else:
        decided = float(ratio) < 1 - LOW
        gain = torch.tensor(advantage * (1 - LOW)) if decided else advantage * ratio
    weight = min(np.exp(prev - sampler), TRUNCATE)
    difference = reference - logprob
    # The gradient of the divergence itself: that of the estimate, and of how probable its sample is.
    divergence = torch.exp(logprob - logprob.detach()) * (torch.exp(difference) - difference - 1)
    return -weight * gain + PENALTY * divergence, float(decided)


def named(model: Any, *, gradients: bool) -> dict[str, np.ndarray]:
    """Parameters, or their gradients, by the names that checkpoints have: one per expert."""
    found: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        value = (parameter.grad if gradients else parameter).detach().numpy().copy()
        if name.endswith("experts.gate_up_proj"):
            for expert, rows in enumerate(value):
                gate, up = np.split(rows, 2)
                found[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                found[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(value):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = rows
        else:
            found[name] = value
    return found
