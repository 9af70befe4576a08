//! The tests of the lab that are not for the lite edition, and why.

const RETRY: &str =
    "a limit: at REPEATABLE READ what the snapshot lacks of a lease asks for a retry";
const SESSION_ROLE: &str = "there the session's role counts, not a function's";
const CANCEL: &str =
    "a limit: a cancel in the millisecond in which a wait in the queue ends is lost";
const NO_MEMORY: &str = "a limit: nothing is remembered from one call to the next";
const SETTING: &str = "the setting is judged when a row is written, not when it is set";
const CLOCK: &str = "a limit: a wait is counted by the server's clock";
const SLOW: &str = "too slow for it: SQL in hundreds of thousands of rounds";
const DEPENDS: &str = "there the trigger fence_named depends on the column";
const BY_HAND: &str = "a limit: a trigger made by hand knows less";
const COMMAND: &str = "the command asks for what only the extension has";
const CATALOG: &str = "it names functions and relations that only the extension has";
const MAINTENANCE: &str =
    "a limit: a try waits while VACUUM FULL and the like work on the table of the leases, or wait for it";
const KEEPS_LOCK: &str =
    "a limit: who has looked at the leases keeps the table's share lock until its transaction ends";
const PAGES: &str = "a limit: SQL cannot mend an unlogged sequence whose page a server has lost";
const SEARCH_PATH: &str =
    "its trigger on the state finds its log by the search_path, which lite's calls fix for what they write";
const NOT_COMPARED: &str =
    "a limit: lite does not compare what a trigger on the state has left of its write";
const PLAIN: &str = "lite's hints say what helps, whatever the case";
const VERIFY: &str = "lite has no second check behind the other triggers";
const NAMED: &str = "it compares the triggers, and lite has fence_named besides";

const DUMP: &str = "of the extension's dump";
const LOADED: &str =
    "a limit: a dump that is loaded over the live state is a jump, which the next draw notices";
const ROW_TYPE: &str =
    "a limit: functions there have the row's type, and PostgreSQL adds no column that it must fill";
const WHOLE: &str = "a limit: DETAIL shows names and holders whole";
const RIGHTS: &str = "there who writes a bound row must be one that may use leases: 42501";
const TRUST: &str =
    "roles that may use leases trust each other there: nobody is asked whose grant it is";
const ONE_TOKEN: &str =
    "a limit: beside the column a transaction has one token, that which was last guarded or presented";
const EACH_TIME: &str = "the row of the lease is asked each time there: what is over is refused";
const MOVES: &str =
    "a limit: a row that moves is judged as a DELETE and an INSERT by the token of its transaction";
const ITSELF: &str = "a limit: a transaction does not exclude itself";
const FIRST: &str = "a first grant there inserts a row and updates it";

/// A group (`file::`) or a test (`file::name`), and why it is left out.
pub const LEFT_OUT: &[(&str, &str)] = &[
    ("errors::a_detail_is_never_longer_than_a_screen", WHOLE),
    ("secrecy::with_select_on_some_columns_only_those_are_shown", "a limit: who may not read the whole table is shown nothing of its rows"),
    ("secrecy::a_cascade_shows_the_child_to_its_readers_only", "a limit: a refusal within a cascade shows nothing of the row"),
    ("secrecy::without_a_token_the_row_s_lease_is_shown_to_who_may_read_its_columns", PLAIN),
    ("leases::the_view_describes_the_session_where_no_holder_is_named", "there the description is the holder's name, and roles trust each other"),
    ("bound_tables::a_name_that_is_too_long_or_empty_is_an_error", "such a lease is never granted: PF004"),
    ("encodings::a_long_name_is_cut_between_letters_in_every_encoding", WHOLE),
    ("secrecy::a_table_of_one_s_own_tells_nothing_of_another_s_lease", RIGHTS),
    ("secrecy::a_merge_does_not_show_the_token_as_the_presented_one", RIGHTS),
    ("secrecy::a_worker_that_lost_its_rights_is_still_told_to_renew_its_own_grant", RIGHTS),
    ("secrecy::the_holder_is_shown_to_those_who_may_use_leases_only", RIGHTS),
    ("secrecy::the_name_of_a_lease_shows_no_column_that_may_not_be_read", RIGHTS),
    ("foreign_key_cascades::a_role_without_rights_on_the_child_cascades_with_the_token", RIGHTS),
    ("restores::a_dump_goes_on_in_another_cluster_without_its_roles", TRUST),
    ("restores::a_dump_of_the_tables_alone_gives_no_token_twice", "the trigger functions of fenced tables lie in the schema fence"),
    ("server_starts::a_mark_that_was_logged_during_a_crash_is_not_believed_later", "a limit: what was done to the marks by hand"),
    ("bound_tables::an_update_that_changes_the_key_needs_the_old_and_the_new_lease", ONE_TOKEN),
    ("bound_tables::one_statement_over_rows_of_several_leases_needs_a_token_for_all", ONE_TOKEN),
    ("guards::a_guard_comes_before_the_session_s_token", ONE_TOKEN),
    ("guards::two_guards_keep_their_tokens_apart", ONE_TOKEN),
    ("kept_fences::a_guard_of_a_smaller_token_excludes_a_take_over", EACH_TIME),
    ("kept_fences::a_move_is_no_licence_for_a_fence_that_was_never_drawn", MOVES),
    ("kept_fences::a_row_that_moves_keeps_its_greater_fence", MOVES),
    ("partitions::an_accepted_update_is_no_licence_for_a_delete", MOVES),
    ("managed::a_row_that_is_created_freely_and_moves_keeps_the_token_of_its_update", ONE_TOKEN),
    ("managed::a_row_is_created_without_a_token_only_where_no_lease_guards_it", NAMED),
    ("attacks::without_the_secret_of_the_locks_nothing_is_granted", CATALOG),
    ("managed::a_rightful_holder_is_not_told_of_a_newer_one", PLAIN),
    ("protect::it_takes_off_the_fence_and_nothing_else", BY_HAND),
    ("command::pages::every_command_line_of_the_pages_runs", COMMAND),
    ("command::pages::in_a_second_database_the_token_is_not_its_own", RIGHTS),
    ("command::scenarios::a_session_lease_passes_on_when_its_connection_ends", COMMAND),
    ("command::scenarios::all_of_it_is_killed_and_its_session_lease_passes_on", COMMAND),
    ("command::scenarios::several_hold_several_leases", COMMAND),
    ("command::views::refusals_are_followed_over_a_restart_of_the_server", COMMAND),
    ("command::views::refusals_holes_and_counters_are_shown", COMMAND),
    ("command::views::what_is_watched_ends_with_its_reader", COMMAND),
    ("guards::another_role_s_token_is_42501", TRUST),
    ("guards::locks::a_guard_makes_no_row_lock_and_no_multixact", "there a guard is a lock of the lease's row"),
    ("guards::locks::not_even_one_of_the_same_transaction", ITSELF),
    ("leases::pruning_leaves_what_is_guarded", ITSELF),
    ("snapshots::a_grant_after_the_snapshot_is_not_relied_on", RETRY),
    ("snapshots::a_predecessor_whose_commit_waits_for_a_standby_is_not_overlooked", RETRY),
    ("snapshots::a_rewritten_table_shows_what_it_showed", RETRY),
    ("remembered_verdicts::a_verdict_stands_for_its_transaction_though_the_ttl_passes", EACH_TIME),
    ("clock_steps::a_guarded_transaction_outlives_a_step_forward", EACH_TIME),
    ("jumps::a_guard_outlasts_a_jump_until_its_transaction_ends", EACH_TIME),
    (
        "open_transactions::a_stale_write_and_the_write_of_the_next_grant_s_transaction_are_a_deadlock_that_ends",
        EACH_TIME,
    ),
    ("open_transactions::who_has_changed_a_lease_keeps_its_lock", "there the row of the lease is its lock"),
    ("reclaim::a_reclaim_is_for_the_same_role_only", TRUST),
    ("roles::a_bound_table_asks_for_the_role_of_the_lease", TRUST),
    ("roles::a_lease_belongs_to_the_role_that_was_granted_it", TRUST),
    ("roles::a_member_of_the_role_and_a_superuser_may_use_its_leases", TRUST),
    ("roles::who_may_only_administer_a_role_does_not_act_for_it", TRUST),
    ("roles::either_way_of_being_a_member_is_enough_to_act_for_a_role", TRUST),
    ("memberships::rows_that_are_lost_leave_no_name", CATALOG),
    ("roles::the_writers_of_a_fenced_table_need_no_grant", RIGHTS),
    ("prefixes::the_empty_prefix_is_all_names", TRUST),
    ("loaded_dumps::a_session_that_was_there_before_the_dump_goes_on_above_it", DUMP),
    ("loaded_dumps::a_dump_goes_on_where_the_clock_is_a_minute_behind", DUMP),
    ("loaded_dumps::what_a_dump_carries_follows_the_tokens", DUMP),
    ("loaded_dumps::a_dump_from_before_a_jump_makes_no_silenced_token_speak", LOADED),
    ("loaded_dumps::a_dump_loaded_over_the_running_database_gives_no_token_twice", LOADED),
    ("protect::what_cannot_be_protected_is_refused", "lite's fence_protect says it in other words"),
    ("protect::it_adds_a_column_only_where_there_is_none", "there a second fence column is refused"),
    ("protect::called_again_it_keeps_what_the_call_leaves_out", NAMED),
    ("protect::the_children_of_a_table_are_left_with_a_warning", "lite refuses a table that has children"),
    ("protect::with_the_column_there_it_does_not_wait_for_readers", "lite drops the triggers first, which readers hold up"),
    ("table_shapes::a_row_within_a_row_whose_type_is_altered_comes_out_as_without_a_fence", ROW_TYPE),
    ("misplaced_triggers::a_column_renamed_or_dropped_fails_closed", DEPENDS),
    ("errors::a_key_of_several_columns_is_shown_with_its_types", "there a key is jsonb, of the columns of PostgreSQL's own types"),
    ("encodings::a_latin1_database_shows_its_errors_in_the_client_s_encoding", PLAIN),
    ("jumps::rows_ahead_of_the_sequence_are_outrun_by_hand", "lite's audit is shorter"),
    ("writes::added_columns_get_their_defaults_and_keep_their_values", ROW_TYPE),
    ("writes::a_trigger_may_fill_columns_that_were_added", ROW_TYPE),
    ("server_starts::a_sequence_set_back_by_hand_gives_no_token_of_this_life_twice", NO_MEMORY),
    (
        "acquire_any::what_ended_after_the_statement_s_snapshot_is_passed_over",
        "a limit: a row that was pruned meanwhile tells nothing",
    ),
    ("evaluated_anew::", "a limit: where READ COMMITTED evaluates a row anew, the lease is found taken"),
    ("keep::open_transactions_of_any_kind_are_left_for_later", "a limit: what is not committed is not seen"),
    ("keep::ten_thousand_are_kept_in_as_many_calls_as_their_locks_take", "lite counts nothing and keeps no refusals"),
    ("keep::maintenance_is_not_waited_for", MAINTENANCE),
    ("release_and_revoke::an_evicted_holder_leaves_the_others_and_their_guards_alone", "lite has no shared leases"),
    ("protect::tables_of_one_name_in_two_schemas_that_share_leases_are_told_of", "lite's fence_protect says less"),
    (
        "harmless::no_argument_is_too_large_to_be_refused",
        "a limit: PL/pgSQL copies what it is given, and has no memory (53200) before it is refused",
    ),
    ("unlocked_writes::", "a limit: a row of the state that is written by hand is met as any row"),
    ("writes::not_null_of_a_column_of_ours_holds", FIRST),
    ("writes::writes_are_decoded_whatever_the_replica_identity", FIRST),
    ("writes::writes_are_counted_in_the_statistics", FIRST),
    ("open_transactions::a_revocation_waits_for_an_open_change", "a limit: a first grant of a name that is not committed is not seen"),
    (
        "maintenance::a_commit_does_not_queue_behind_maintenance",
        KEEPS_LOCK,
    ),
    ("maintenance::a_try_does_not_queue_behind_maintenance_that_waits", MAINTENANCE),
    ("maintenance::a_waiter_waits_on_while_maintenance_waits", MAINTENANCE),
    ("maintenance::maintenance_goes_on_beside_a_waiter_and_guarded_transactions", MAINTENANCE),
    ("maintenance::a_guard_stands_though_the_table_was_made_shorter", KEEPS_LOCK),
    ("maintenance::who_has_written_keeps_the_table_s_lock_and_no_other", KEEPS_LOCK),
    ("maintenance::who_only_looks_keeps_no_lock_on_the_state", KEEPS_LOCK),
    ("writes::a_trigger_for_a_column_fires_when_that_is_written", SEARCH_PATH),
    ("writes::row_triggers_fire_for_every_write", SEARCH_PATH),
    ("writes::triggers_run_with_the_rights_of_the_caller", "lite writes the state with the rights of its owner"),
    ("writes::a_trigger_that_changes_what_was_written_is_refused", NOT_COMPARED),
    ("writes::a_trigger_that_suppresses_a_write_is_refused", NOT_COMPARED),
    (
        "writes::unique_indexes_and_exclusion_constraints_hold",
        "a limit: a grant that a unique index of an administrator's forbids is answered with NULL",
    ),
    ("writes::foreign_keys_hold_both_ways", "the key of lite's table is the name alone"),
    (
        "writes::statement_triggers_rules_and_row_security_are_not_applied",
        "lite writes by SQL, to which PostgreSQL applies them",
    ),
    ("attacks::an_audit_runs_nothing_of_a_table_s_owner", "lite's audit is shorter"),
    ("dumped::a_dump_loads_where_its_roles_are_missing", "lite's audit is shorter"),
    (
        "adopted_races::who_adopts_through_a_function_of_another_role_adopts_for_that_role",
        SESSION_ROLE,
    ),
    ("leaving::a_cancel_that_comes_when_the_wait_ends_is_not_lost", CANCEL),
    ("leaving::a_wait_leaves_another_extension_s_handler_of_cancels_as_it_was", "there lock_timeout ends a wait, for which PostgreSQL sends itself a SIGINT"),
    ("leaving::what_comes_together_with_the_end_of_a_wait_counts", CANCEL),
    ("order::an_administrator_sees_the_queue", "lite's waits have PostgreSQL's own names"),
    ("order::at_repeatable_read_what_was_waited_for_serves_the_next_transaction", RETRY),
    (
        "encodings::a_database_without_an_encoding_has_readable_errors",
        "a limit: PostgreSQL makes no JSON of bytes in no encoding: 22021, and refused all the same",
    ),
    (
        "encodings::refused_writes_are_kept_in_the_database_s_encoding",
        "lite counts nothing and keeps no refusals",
    ),
    (
        "backtraces::an_error_of_postgres_itself_passes_through_without_a_path",
        "where its table is gone, PL/pgSQL says so: 42P01",
    ),
    (
        "dumped::a_restored_database_has_the_same_roles_with_the_same_names",
        CATALOG,
    ),
    ("leases::session_bound::", "lite has no session leases"),
    ("leases::session_durability::", "lite has no session leases"),
    ("session_races::", "lite has no session leases"),
    ("leases::shared::", "lite has no shared leases"),
    ("leases::slots::", "lite has no slots"),
    ("leases::several::", "lite takes one lease a call"),
    ("mixed_modes::", "lite has exclusive leases only"),
    ("leases::uncommitted::", "lite does not show an acquire that is not committed"),
    ("leases::lock_table::", "lite does not count a session's locks"),
    ("fence::verify::", VERIFY),
    ("kept_fences::the_second_check_lets_a_kept_fence_pass_and_no_other", VERIFY),
    ("managed::what_was_accepted_is_what_must_be_stored", VERIFY),
    ("protect::a_partition_made_later_is_fenced_alike", VERIFY),
    ("statistics::", "lite counts nothing and keeps no refusals"),
    ("audit::", "lite's audit is shorter, and has tests of its own"),
    ("tools::adopted::", "lite adopts no leases of others"),
    ("project::", "of packages, the pages' examples and the extension's scripts"),
    (
        "guards::a_guard_that_ends_with_its_statement_is_warned_of",
        "PL/pgSQL does not see a transaction end",
    ),
    (
        "pipelines::a_guard_is_warned_of_only_where_nothing_follows_it",
        "PL/pgSQL does not see a transaction end",
    ),
    (
        "remembered_verdicts::the_check_costs_once_per_lease_and_transaction",
        "of the extension's own locks",
    ),
    ("snapshots::changing_a_lease_is_never_too_late", RETRY),
    ("snapshots::it_is_the_grant_that_counts_not_its_latest_token", RETRY),
    ("snapshots::what_a_savepoint_took_back_vouches_for_nothing", RETRY),
    (
        "durability::a_jump_of_an_open_transaction_survives_a_crash",
        "a limit: fence_new_epoch() wants its commit",
    ),
    (
        "durability::a_sequence_altered_in_the_transaction_is_refused",
        "what an open transaction did to it is not seen",
    ),
    ("jumps::a_session_that_only_checks_sees_each_jump", NO_MEMORY),
    ("jumps::the_status_tells_who_and_where_the_database_is", "of the library's version"),
    ("setting::a_value_set_before_the_library_is_loaded_is_looked_at_then", SETTING),
    ("setting::a_value_that_is_no_token_is_refused", SETTING),
    ("setting::other_names_with_its_prefix_are_refused", SETTING),
    ("clock_steps::a_waiter_gets_the_lease_that_a_step_forward_has_ended", CLOCK),
    ("clock_steps::a_wait_ends_in_time_though_the_clock_goes_back", CLOCK),
    ("clock_steps::a_wait_goes_on_though_the_clock_goes_forward", CLOCK),
    ("clock_steps::who_is_behind_the_first_waits_longer_when_the_clock_goes_back", CLOCK),
    ("failed_calls::a_check_runs_beside_a_parallel_plan", SLOW),
    ("failed_calls::errors_that_are_caught_keep_no_memory", SLOW),
    (
        "bound_tables::writers_need_no_grant_but_the_lease_must_be_theirs",
        SESSION_ROLE,
    ),
    ("misplaced_triggers::a_column_of_the_wrong_kind_fails_closed", DEPENDS),
    ("table_shapes::a_row_type_altered_in_the_same_session_is_seen", DEPENDS),
    ("misplaced_triggers::a_lease_that_cannot_be_worked_out_fails_closed", BY_HAND),
    ("misplaced_triggers::empty_arguments_stand_for_defaults", BY_HAND),
    ("misplaced_triggers::the_trigger_made_by_hand_is_the_one_of_the_readme", BY_HAND),
    (
        "misplaced_triggers::the_function_called_by_hand_is_refused",
        "PostgreSQL refuses it itself, with 0A000",
    ),
    (
        "partitions::an_update_that_is_skipped_is_no_licence_for_a_delete",
        "a limit: it is one, with the same token, for that version of the row",
    ),
    ("kept_fences::the_hint_of_a_stale_token_fits_the_table", PLAIN),
    ("managed::the_hint_says_what_became_of_the_column", PLAIN),
    (
        "protect::it_says_what_it_added_and_what_that_leaves_open",
        "lite's fence_protect says less",
    ),
    ("protect::binding_and_unbinding_change_what_depends_on_the_lease", NAMED),
    ("protect::called_again_it_attaches_anew", NAMED),
    ("protect::called_again_it_re_attaches_what_was_dropped", NAMED),
    ("protect::it_attaches_what_the_arguments_say", NAMED),
    ("subscriptions::an_ordinary_trigger_does_not_see_an_apply_worker", "lite's audit is shorter"),
    (
        "subscriptions::the_audit_calls_fences_that_a_subscription_brought_no_hole",
        "lite's audit is shorter",
    ),
    (
        "restores::a_dump_by_an_owner_who_may_not_read_the_state_gives_no_token_twice",
        "of the extension's dump",
    ),
    ("restores::a_dump_carries_the_grants", "PUBLIC may look into lite's schema fence"),
    (
        "server_starts::a_mark_that_was_made_logged_tells_nothing",
        "a limit: what was done to the marks by hand",
    ),
    (
        "server_starts::a_second_crash_right_after_the_move_does_not_undo_it",
        "a limit: before PostgreSQL 17 the move is not on disk before the clock has to help",
    ),
    ("server_starts::a_template_copied_without_wal_survives_a_crash", PAGES),
    ("server_starts::marks_that_have_lost_their_pages_are_made_anew_as_the_hint_says", PAGES),
    ("roles::levels::each_function_is_for_the_levels_that_the_table_names", CATALOG),
    ("roles::levels::each_relation_is_for_the_levels_that_the_table_names", CATALOG),
    ("roles::public_gets_the_trigger_and_its_helpers_and_nothing_else", CATALOG),
    ("memberships::a_role_that_is_made_again_begins_afresh", CATALOG),
    ("memberships::a_role_made_again_has_no_old_names_by_a_membership_either", CATALOG),
    ("not_shown::one_lease_is_looked_up_by_its_name", CATALOG),
    ("revocation::open_sessions_learn_at_once", CATALOG),
    ("revocation::what_is_rolled_back_counts_no_more_in_its_own_session", CATALOG),
    (
        "attacks::default_privileges_of_the_installer_give_nothing_away",
        "PUBLIC may look into lite's schema fence",
    ),
    ("attacks::temporary_objects_shadow_nothing", "it compares the version of the library"),
    ("roles::longest_ttl::", "pg_fence.max_ttl is a setting of the library"),
    ("roles::malformed::", "of rows that only the owner of the state could write"),
    (
        "memberships::a_security_definer_function_has_its_owner_s_names",
        SESSION_ROLE,
    ),
    (
        "release_and_revoke::a_release_that_is_rolled_back_with_its_savepoint_never_was",
        "a limit: who waits for a release learns of a savepoint's rollback at the transaction's end",
    ),
    ("waiting::events::", "lite's waits have PostgreSQL's own names"),
    (
        "leaving::a_client_that_disconnects_leaves",
        "a limit: a waiter does not look after its client",
    ),
    (
        "leaving::a_killed_client_is_granted_nothing",
        "a limit: a waiter does not look after its client",
    ),
    (
        "pooler::a_client_that_goes_away_leaves_neither_guard_nor_place_in_the_queue",
        "a limit: a waiter does not look after its client",
    ),
    (
        "open_transactions::a_token_of_an_open_grant_is_waited_for",
        "a limit: what is not committed is not seen",
    ),
    (
        "schema_renames::",
        "lite's functions know their schema by its name, which only its owner can change",
    ),
];

/// Why the lite edition leaves a test out, by its name with all its modules; None where it does not.
pub fn reason(test: &str) -> Option<&'static str> {
    LEFT_OUT.iter().find(|(what, _)| is_meant(what, test)).map(|(_, why)| *why)
}

/// The entries of the list that name none of these tests: renamed or deleted since, perhaps.
pub fn without_a_test(tests: &[String]) -> Vec<&'static str> {
    let names = LEFT_OUT.iter().map(|(what, _)| *what);
    names.filter(|what| !tests.iter().any(|test| is_meant(what, test))).collect()
}

fn is_meant(what: &str, test: &str) -> bool {
    let (what, test) = (format!("::{what}"), format!("::{test}"));
    if what.ends_with("::") {
        test.contains(&what)
    } else {
        test.ends_with(&what)
    }
}
