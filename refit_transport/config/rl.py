"""From a YAML file to a GRPO or PPO job, or to one `ConfigError` with everything that is wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from refit_transport.config.document import Document, read_document
from refit_transport.config.facts import TransportLookup, job_of
from refit_transport.config.foreign import FOREIGN_KEYS
from refit_transport.config.keys import dotted, nearest, section_of, shown, value_at
from refit_transport.config.load import checked, repaired
from refit_transport.config.rl_rules import RlJob, broken_rl_rules
from refit_transport.config.rl_schema import RlSections
from refit_transport.config.schema import Policy, RefitConfig
from refit_transport.config.translate import translated
from refit_transport.errors import ConfigError, Violation
from refit_transport.rl.advantages import GaeSettings, GroupSettings
from refit_transport.rl.settings import ImportanceSettings, KlSettings, PolicyLossSettings, ValueLossSettings
from refit_transport.rl.tasks import Task, task_from


@dataclass(frozen=True, slots=True)
class RlConfig:
    """A whole job: `refit` says who trains, who generates and how weights move, `sections` what is learned and how."""

    refit: RefitConfig
    sections: RlSections

    def task(self) -> Task:
        """What is learned."""
        train = self.sections.data.train
        return task_from(train.dataset_name, train.kwargs)

    def validation_task(self) -> Task | None:
        """What the policy is judged by beside its training; None: nothing."""
        validation = self.sections.data.validation
        return None if validation is None else task_from(validation.dataset_name, validation.kwargs)

    def policy_loss(self) -> PolicyLossSettings:
        """Of `loss_fn`."""
        loss = self.sections.loss_fn
        importance = ImportanceSettings(
            loss.truncated_importance_sampling_type,
            loss.truncated_importance_sampling_ratio,
            loss.truncated_importance_sampling_ratio_min,
        )
        return PolicyLossSettings(
            ratio_clip_min=loss.ratio_clip_min,
            ratio_clip_max=loss.ratio_clip_max,
            ratio_clip_c=loss.ratio_clip_c,
            token_level_loss=loss.token_level_loss,
            sequence_level_importance_ratios=loss.sequence_level_importance_ratios,
            force_on_policy_ratio=loss.force_on_policy_ratio,
            importance=importance if loss.use_importance_sampling_correction else None,
            kl=None if loss.use_kl_in_reward else self._kl(),
        )

    def value_loss(self) -> ValueLossSettings:
        """Of `value_loss_fn`."""
        return ValueLossSettings(self.sections.value_loss_fn.scale, self.sections.value_loss_fn.cliprange)

    def group_advantages(self) -> GroupSettings:
        """Of `grpo`.

        Raises:
            ValueError: the job is PPO.
        """
        if (grpo := self.sections.grpo) is None:
            raise ValueError("a job without grpo has no group-relative advantages")
        own = grpo.adv_estimator
        return GroupSettings(
            grpo.use_leave_one_out_baseline
            if own.use_leave_one_out_baseline is None
            else own.use_leave_one_out_baseline,
            grpo.normalize_rewards if own.normalize_rewards is None else own.normalize_rewards,
        )

    def gae(self) -> GaeSettings:
        """Of `ppo`.

        Raises:
            ValueError: the job is GRPO.
        """
        if (ppo := self.sections.ppo) is None:
            raise ValueError("a job without ppo has no critic for GAE")
        estimator = ppo.adv_estimator
        return GaeSettings(
            gae_gamma=estimator.gae_gamma,
            gae_lambda=estimator.gae_lambda,
            normalize_advantages=estimator.normalize_advantages,
            kl=self._kl() if self.sections.loss_fn.use_kl_in_reward else None,
        )

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the reference policy are used anywhere."""
        return self._kl() is not None

    def _kl(self) -> KlSettings | None:
        loss = self.sections.loss_fn
        if not loss.reference_policy_kl_penalty:
            return None
        return KlSettings(
            loss.reference_policy_kl_penalty,
            loss.reference_policy_kl_type,
            loss.kl_input_clamp_value,
            loss.kl_output_clamp_value,
        )


def load_rl_config(path: str | Path, *, resolve_transport: TransportLookup, overrides: Sequence[str] = ()) -> RlConfig:
    """Reads, merges and checks the configuration file of a GRPO or PPO job.

    `overrides` are `key.path=value` texts, applied last. `resolve_transport` is `transports.registry.resolve`.

    Raises:
        ConfigError: with one violation for each problem.
    """
    document = read_document(Path(path), overrides)
    found: list[Violation] = []
    refit: RefitConfig | None = None
    try:
        refit = checked(document, resolve_transport)
    except ConfigError as error:
        found += error.violations
    told = {violation.path for violation in found}
    job = None if refit is None else job_of(refit, document=document.values, resolve_transport=resolve_transport)
    sections, problems = _sections(document, told=told)
    doubtful = frozenset(told | {violation.path for violation in problems})
    problems += broken_rl_rules(RlJob(sections, job), doubtful=doubtful)
    found += [document.with_origin(problem) for problem in problems if problem.path not in told]
    if found or refit is None:
        raise ConfigError(document.source, tuple(found))
    return RlConfig(refit, sections)


def _sections(document: Document, *, told: set[str]) -> tuple[RlSections, list[Violation]]:
    """The sections, with defaults for what is refused, and why it is."""
    values = {key: copy.deepcopy(document.values[key]) for key in _known(()) if key in document.values}
    found = [problem for problem in document.problems if _is_read(problem.path)]
    found += _unknown_in_value(values)
    unsettled = {problem.path for problem in found} | told
    try:
        return RlSections.model_validate(values), found
    except ValidationError as error:
        unknown = {
            dotted(details["loc"]): details for details in error.errors() if details["type"] == "extra_forbidden"
        }
        for problem in translated(error):
            if problem.path in unknown:
                *where, key = unknown[problem.path]["loc"]
                found.append(_unknown(dotted(tuple(where)), str(key), problem.value, _known(tuple(map(str, where)))))
            elif problem.path not in unsettled:
                found.append(problem)
        return repaired(values, error, RlSections), found


def _known(where: tuple[str, ...]) -> frozenset[str]:
    """The keys of a section."""
    model: Any = RlSections
    for key in where:
        field = model.model_fields.get(key)
        model = section_of(field.annotation) if field is not None else None
        if model is None:
            return frozenset()
    return frozenset(model.model_fields)


def _is_read(path: str) -> bool:
    *where, key = path.split("[", maxsplit=1)[0].split(".")
    return key in _known(tuple(where))


def _unknown_in_value(values: Mapping[str, Any]) -> Iterator[Violation]:
    """Misspelt keys of the critic, whose sections have the policy's other keys too."""
    for inner in ("", ".megatron_cfg", ".megatron_cfg.optimizer"):
        section = f"value{inner}"
        known = FOREIGN_KEYS[f"policy{inner}"] | _known(tuple(section.split("."))) | frozenset(Policy.model_fields)
        given = value_at(values, section)
        for key in given.keys() - known if isinstance(given, Mapping) else ():
            yield _unknown(section, str(key), shown(given[key]), known)


def _unknown(section: str, key: str, value: str, known: frozenset[str]) -> Violation:
    near = nearest(key, known)
    remedy = f"did you mean {near!r}?" if near is not None else f"known here: {', '.join(sorted(known))}"
    return Violation(
        f"{section}.{key}", value, f"is not a key of {section!r}", remedy if len(remedy) < 400 else "remove it"
    )
