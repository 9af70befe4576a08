//! All tests that need a server, in one program with one shared server. A function marked with `#[lab_test]` is one.
//!
//! A folder is a topic, and the file of its name says which. `automod` makes a module of every file: none is listed.

automod::dir!("tests/lab");

fn main() -> std::process::ExitCode {
    pg_test::test_case::run_all(env!("CARGO_BIN_EXE_pg_test").as_ref())
}
