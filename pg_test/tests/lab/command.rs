//! The command `pg_fence`: real processes that are frozen and killed, with a real psql as the program that knows
//! nothing of leases. On a machine where the client in Rust was never built, these are left out: `cargo run --
//! clients rust` brings what it needs.

automod::dir!("tests/lab/command");
