"""Section 9 of the semantics: the scenarios that concern the core, and where each is held.

The table is checked: a scenario whose test was renamed or dropped fails here. What is left of
section 9 (transfers, ranges, dead owners seen by a client) belongs to the layers above the core.
"""

from __future__ import annotations

import importlib

import pytest

SCENARIOS: dict[str, tuple[str, ...]] = {
    "mount twice": ("test_segments:test_mount_twice_is_one_segment",),
    "unmount twice": ("test_segments:test_unmount_twice",),
    "unmount hides replicas at once": ("test_segments:test_unmount_hides_replicas_at_once",),
    "objects with a second replica stay readable": (
        "test_segments:test_objects_with_a_second_replica_stay_readable",
    ),
    "graceful unmount by a stranger refused": (
        "test_segments:test_only_owner_or_admin_unmounts",
        "test_segments:test_graceful_unmount_reads_until_its_deadline",
    ),
    "put params refused": (
        "test_bad_input:test_sizes_out_of_range",
        "test_bad_input:test_absurd_replica_counts",
        "test_bad_input:test_names_too_long",
    ),
    "discard and release with three segments and three replicas": (
        "test_puts:test_three_segments_three_replicas_discard_and_release",
    ),
    "replicas on distinct segments, 10 of 20": (
        "test_puts:test_replicas_lie_on_distinct_segments",
    ),
    "two replicas with one segment": ("test_puts:test_fewer_replicas_than_asked_is_success",),
    "preferred segment found, full, unknown": (
        "test_puts:test_preferred_segment_is_used",
        "test_puts:test_a_full_preferred_segment_is_no_obstacle",
        "test_puts:test_an_unknown_preferred_segment_is_no_obstacle",
    ),
    "excluded beats preferred": ("test_puts:test_excluded_beats_preferred",),
    "soft-pin deadline rules": (
        "test_puts:test_soft_pin_defaults_and_limits",
        "test_puts:test_a_soft_pin_runs_from_the_moment_the_object_is_readable",
        "test_puts:test_reads_do_not_prolong_a_soft_pin",
        "test_puts:test_what_an_upsert_does_to_a_soft_pin",
    ),
    "groups": (
        "test_eviction:test_a_group_leaves_whole",
        "test_eviction:test_a_group_with_a_leased_member_stays_and_another_takes_its_place",
    ),
    "tenants isolate": (
        "test_puts:test_tenants_list_and_remove_apart",
        "test_puts:test_a_tenant_over_quota_loses_its_own_coldest",
    ),
    "leased remove refused then allowed": (
        "test_leases:test_a_leased_remove_is_refused_then_allowed",
    ),
    "remove_all skips leased": ("test_states:test_table",),
    "writers, readers and remove_all interleaved": (
        "test_stateful:test_every_reply_agrees_with_the_model",
        "test_stateful:test_seeded_runs_agree_with_the_model",
    ),
    "16,000 small puts into a segment that holds fewer": (
        "test_eviction:test_a_full_segment_takes_16000_small_puts",
    ),
    "leased objects survive pressure": ("test_eviction:test_leased_objects_survive_pressure",),
    "copy and move, every error": (
        "test_segments:test_errors_of_copy_and_move",
        "test_segments:test_only_the_worker_of_a_task_ends_it",
        "test_segments:test_a_segment_that_goes_away_during_a_copy",
    ),
    "tasks fetched by their worker only": (
        "test_tasks:test_tasks_are_fetched_by_their_worker_only",
    ),
    "drain converges, cancels, fails after retries": (
        "test_tasks:test_a_drain_converges",
        "test_tasks:test_a_cancelled_drain_restores_the_segment",
        "test_tasks:test_a_drain_fails_after_retries",
    ),
    "upsert same size, other size": ("test_states:test_upsert_same_and_other_size",),
    "upsert over a running upsert": ("test_states:test_upsert_over_a_running_upsert_pre_empts_it",),
    "upsert revoked": ("test_states:test_upsert_revoked_leaves_the_old_value",),
    "slow reader outliving its lease": (
        "test_leases:test_a_slow_reader_outliving_its_lease_is_told",
        "test_leases:test_renew_refuses_an_object_whose_replicas_are_gone",
    ),
    "duplicate keys inside one batch": (
        "test_bad_input:test_duplicate_keys_in_one_batch_first_wins",
        "test_bad_input:test_duplicate_keys_in_one_upsert_last_wins",
    ),
    "batch order preserved": ("test_bad_input:test_batch_order_is_preserved",),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_has_its_test(scenario: str) -> None:
    for place in SCENARIOS[scenario]:
        module, name = place.split(":")
        assert callable(getattr(importlib.import_module(f"tests.core.{module}"), name))
