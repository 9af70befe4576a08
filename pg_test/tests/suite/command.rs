//! The command `pg_fence`: real processes that are frozen and killed, and a real psql as the program that knows nothing
//! of leases. If the client in Rust was never built on this machine, these tests are ignored: `cargo run -- clients
//! rust` builds it.

automod::dir!("tests/suite/command");
