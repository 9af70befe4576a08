//! pg_fence: leases with fencing tokens, and a trigger that refuses stale writes.
//!
//! One direction of flow: SQL call → `input` → lock and read (`pg`) → decide (`pg_fence_rules`, pure) → write →
//! SQL answer. The SQL objects are written by hand in `sql/`; the C functions that they name are listed in
//! `pg::entry`.
//!
//! What is deliberately absent: SPI on the way of a lease or a write (no plan, no `search_path`, no rights of
//! the caller's), background workers, shared memory of our own (no `shared_preload_libraries`), LISTEN/NOTIFY,
//! and any use of a transaction's start time but as a lower bound of its snapshot's age (`pg::snapshot_age`).

mod abbreviate;
mod errors;
mod fence;
mod leases;
mod pg;
mod plant;
mod sql;
mod tokens;

::pgrx::pg_module_magic!(name, version);

// The parts of the install script, for `cargo pgrx`.
::pgrx::extension_sql_file!("../sql/1_schema.sql", name = "schema");
::pgrx::extension_sql_file!("../sql/2_leases.sql", name = "leases", requires = ["schema"]);
::pgrx::extension_sql_file!("../sql/3_fence.sql", name = "fence", requires = ["leases"]);
::pgrx::extension_sql_file!("../sql/4_audit.sql", name = "audit", requires = ["fence"]);
::pgrx::extension_sql_file!("../sql/5_grants.sql", name = "grants", requires = ["audit"]);
