//! All tests that need a server, in one program with one shared server. A function marked with `#[lab_test]`
//! in any of these files is one.

mod attacks;
mod audit;
mod backtraces;
mod bound_tables;
mod chaos;
mod clock_steps;
mod cursors;
mod decision_time;
mod documented_limits;
mod durability;
mod encodings;
mod epoch_jumps;
mod error_secrecy;
mod errors;
mod failed_calls;
mod failover;
mod fence;
mod foreign_key_cascades;
mod guard_locks;
mod guards;
mod imported_snapshots;
mod install;
mod isolation_specs;
mod lab_itself;
mod lease_info;
mod leases;
mod leaving_the_queue;
mod lock_table;
mod managed;
mod misplaced_triggers;
mod mixed_modes;
mod orm;
mod partitions;
mod pipelines;
mod pooler;
mod promotions;
mod protect;
mod queue_order;
mod queue_wakeup;
mod read_only;
mod readme;
mod reclaim;
mod release_and_revoke;
mod remembered_verdicts;
mod restores;
mod roles;
mod row_comparison_gaps;
mod server_starts;
mod session_leases;
mod session_races;
mod several_leases;
mod shared_grants;
mod signatures_and_inputs;
mod slots;
mod snapshots;
mod soak;
mod state_maintenance;
mod state_repack;
mod state_writes;
mod stories;
mod subscriptions;
mod support;
mod table_shapes;
mod token_setting;
mod tokens;
mod tries_without_wait;
mod uncommitted_grants;
mod upgrades;
mod verify_option;
mod waits;
mod write_paths;

fn main() -> std::process::ExitCode {
    pg_test::test_case::run_all(env!("CARGO_BIN_EXE_pg_test").as_ref())
}
