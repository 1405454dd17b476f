"""The cases that every refit must stand, and where each is tested."""

from __future__ import annotations

from dataclasses import dataclass

CASES = "tests/faults/test_cases.py::"
CAMPAIGN = "tests/faults/test_campaign.py::test_every_kind_of_fault"
SESSION = "tests/session/test_session.py::"
E2E = "tests/e2e/"


@dataclass(frozen=True, slots=True)
class TestedCase:
    """One case: what happens, what is right, and tests as `file::function`."""

    number: int
    what: str
    right: str
    tests: tuple[str, ...]

    __test__ = False


ALL = (
    TestedCase(1, "ranks join in opposite order", "joined", (CASES + "test_ranks_join_in_any_order",)),
    TestedCase(
        2,
        "one rank is busy while others come to a refit",
        "nobody runs ahead",
        (CASES + "test_nobody_runs_ahead_of_a_rank_that_is_busy",),
    ),
    TestedCase(
        3,
        "a target is ready late",
        "nothing was in flight; the deadline counts from readiness",
        (
            CASES + "test_a_late_ranks_time_is_not_taken_from_the_transfer",
            CASES + "test_a_rank_that_comes_too_late_finds_nothing_in_flight",
        ),
    ),
    TestedCase(4, "a target is killed", "it is named in time; the next refit is exact", (CAMPAIGN,)),
    TestedCase(
        5,
        "a target rejects one tensor",
        "the refit ends with its name",
        (SESSION + "test_a_target_that_refuses_a_tensor_ends_the_refit_everywhere_with_its_name",),
    ),
    TestedCase(
        6,
        "an update ends midway, then a full one",
        "the second is exact, nothing stays open",
        (
            CAMPAIGN,
            E2E + "test_negative_controls.py::test_after_a_failed_refit_engines_stay_fenced_and_the_next_one_is_exact",
        ),
    ),
    TestedCase(
        7,
        "one of two replicas fails",
        "none reports the new version",
        (SESSION + "test_a_target_that_fails_to_process_keeps_every_rank_from_the_new_version", CAMPAIGN),
    ),
    TestedCase(
        8,
        "another model",
        "refused before anything moves",
        ("tests/session/test_fail_closed.py::test_it_ends_every_rank_before_a_byte_moves", CAMPAIGN),
    ),
    TestedCase(
        9,
        "versions start again",
        "refused with both numbers",
        (
            SESSION + "test_a_version_that_does_not_grow_is_refused_with_both_numbers",
            SESSION + "test_versions_go_on_where_earlier_sessions_ended",
        ),
    ),
    TestedCase(
        10,
        "payloads smaller than a tensor, two stages, values change",
        "nothing missing, nothing old",
        (CASES + "test_values_change_between_refits_with_payloads_smaller_than_a_tensor",),
    ),
    TestedCase(
        11,
        "a payload of zeros",
        "its ends are right after each hop",
        (CASES + "test_a_payload_of_zeros_arrives_to_its_ends_at_every_hop",),
    ),
    TestedCase(
        12,
        "500 refits; connecting in a loop",
        "memory, descriptors, threads flat",
        (
            "tests/faults/test_campaign.py::test_many_refits_in_a_row_grow_nothing",
            "tests/fabrics/test_shared_memory.py::test_nothing_is_left_after_many_connects",
        ),
    ),
    TestedCase(
        13,
        "a limit smaller than the memory",
        "one clear message",
        (
            "tests/fabrics/test_shared_memory_faults.py::test_a_system_that_gives_no_memory",
            "tests/fabrics/test_shared_memory_faults.py::test_more_memory_than_there_are_addresses",
        ),
    ),
    TestedCase(
        14,
        "a source that makes its tensors as they are asked for",
        "never more than the budget alive",
        (SESSION + "test_a_refit_checks_out_and_stays_in_its_footprint",),
    ),
    TestedCase(
        15,
        "layers that are packed at load; two refits",
        "as freshly loaded both times",
        ("tests/targets/test_vllm_target.py::test_refits_equal_a_fresh_engine",),
    ),
    TestedCase(
        16,
        "the same conversion at each refit (FP8 is refused today)",
        "equal refits give equal weights",
        (
            E2E + "test_async_generation.py::test_a_refit_of_the_same_weights_changes_nothing_but_the_stamps",
            "tests/config/test_rules.py::test_other_weights_than_the_checkpoints_are_refused",
        ),
    ),
    TestedCase(
        17,
        "a refit that does nothing",
        "checksums say so",
        (E2E + "test_negative_controls.py::test_a_mistake_is_seen",),
    ),
    TestedCase(
        18,
        "a prefix cache of old weights",
        "as a cold start with the new ones",
        (E2E + "test_async_generation.py::test_a_kept_cache_is_never_found_by_later_prompts",),
    ),
    TestedCase(
        19,
        "a lost acknowledgement",
        "applied once",
        (CASES + "test_a_refit_whose_acknowledgement_was_lost_is_applied_once",),
    ),
    TestedCase(
        20,
        "what is checked isn't what is served",
        "checksums are of what is served",
        (
            "tests/session/test_verification.py::test_one_bit_on_one_rank_is_named_with_tensor_box_and_ranks",
            "tests/session/test_verification.py::test_a_derived_tensor_that_is_stale_is_named",
        ),
    ),
    TestedCase(21, "two jobs on one host", "no crosstalk", (CAMPAIGN,)),
    TestedCase(
        22,
        "peers with other settings or another schema",
        "refused, naming the setting",
        (CASES + "test_other_settings_are_refused_and_named", CAMPAIGN),
    ),
    TestedCase(
        23,
        "memory that can't be sent from directly",
        "staged",
        (
            "tests/targets/test_module.py::test_what_is_stored_in_another_form_is_received_beside_it_and_compared",
            "tests/targets/test_vllm_target.py::test_packed_layers_are_found_by_proof",
        ),
    ),
    TestedCase(
        24,
        "adapters (not delivered today)",
        "refused",
        ("tests/config/test_rules.py::test_other_weights_than_the_checkpoints_are_refused",),
    ),
)
