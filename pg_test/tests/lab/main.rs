//! All tests that need a server, in one program with one shared server. A function marked with `#[lab_test]`
//! in any of these files is one.

mod attacks;
mod audit;
mod backtraces;
mod batch;
mod bound;
mod cascades;
mod chaos;
mod clocks;
mod closing;
mod cursors;
mod durability;
mod encodings;
mod epochs;
mod errors;
mod failover;
mod fence;
mod gaps;
mod guards;
mod imported_snapshots;
mod info;
mod inputs;
mod install;
mod leases;
mod leaving;
mod leftovers;
mod limits;
mod line;
mod lock_table;
mod lockout;
mod managed;
mod mingled;
mod misuse;
mod orm;
mod partitions;
mod paths;
mod pipelines;
mod pooler;
mod promotions;
mod protect;
mod races;
mod readers;
mod readme;
mod reclaim;
mod restores;
mod roles;
mod secrets;
mod session_leases;
mod setting;
mod shapes;
mod slots;
mod smoke;
mod snapshots;
mod soak;
mod specs;
mod starts;
mod state_maintenance;
mod state_repack;
mod state_writes;
mod stories;
mod subscriptions;
mod support;
mod times;
mod together;
mod tokens;
mod tries;
mod uncommitted;
mod upgrades;
mod verdicts;
mod verify;
mod waits;
mod woken;

fn main() -> std::process::ExitCode {
    pg_test::test_case::run_all(env!("CARGO_BIN_EXE_pg_test").as_ref())
}
