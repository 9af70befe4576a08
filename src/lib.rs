//! pg_fence: leases with fencing tokens, and a trigger that refuses stale writes.
//!
//! Each module calls only those below it:
//!
//! | module | content |
//! | --- | --- |
//! | `sql` | the functions that SQL calls, and their arguments; the SQL objects themselves are in `sql/` |
//! | `transaction_end` | what happens when a transaction commits or rolls back, in order |
//! | `leases`, `fence` | granting, changing, guarding and waiting; the trigger |
//! | `tokens` | drawing tokens, and when the sequence advances |
//! | `statistics` | counters, and the shared memory in which all sessions see them |
//! | `pg` | PostgreSQL: tables, locks, transactions, settings; the only one with `unsafe` blocks, but for `encoding` |
//! | `errors` | every error in words: SQLSTATE, message, detail, hint |
//! | `encoding` | conversions between the database's encoding and UTF-8 |
//! | `rules` | the rules that decide, and the table of locks: a crate of its own that knows no server |
//!
//! A call reads its arguments and the rows, locks, reads the rows again (`leases::locks`), decides (`rules`), draws a
//! token (`tokens`), writes and answers.
//!
//! `docs/internals/architecture.md` says what is deliberately absent.

#![warn(missing_docs)]

mod encoding;
mod errors;
mod fence;
mod leases;
mod pg;
mod sql;
mod statistics;
mod tokens;
mod transaction_end;

::pgrx::pg_module_magic!(name, version);

/// Postgres calls this in each backend when it loads the library.
#[unsafe(no_mangle)]
#[allow(unsafe_code)] // for its name
extern "C-unwind" fn _PG_init() {
    pg::load::load(transaction_end::LISTENER);
}

// The parts of the install script, for `cargo pgrx`.
::pgrx::extension_sql_file!("../sql/1_schema.sql", name = "schema");
::pgrx::extension_sql_file!("../sql/2_leases.sql", name = "leases", requires = ["schema"]);
::pgrx::extension_sql_file!("../sql/2_statistics.sql", name = "statistics", requires = ["leases"]);
::pgrx::extension_sql_file!("../sql/3_fence.sql", name = "fence", requires = ["statistics"]);
::pgrx::extension_sql_file!("../sql/3_row_leases.sql", name = "row_leases", requires = ["fence"]);
::pgrx::extension_sql_file!("../sql/4_audit.sql", name = "audit", requires = ["row_leases"]);
::pgrx::extension_sql_file!("../sql/4_audit_state.sql", name = "audit_state", requires = ["audit"]);
::pgrx::extension_sql_file!("../sql/5_grants.sql", name = "grants", requires = ["audit_state"]);
