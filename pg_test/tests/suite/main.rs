//! All tests that need a server, in one program with one shared server. Each is a function marked with `#[harness_test]`,
//! or in a scenario file.
//!
//! A folder is a topic, described in the file of its name. `automod` makes a module of every file, so there is no list
//! of them.

/// Defines tests that differ only in what they pass to a function: `name => function(what)`.
macro_rules! cases {
    (slow: $($test:ident => $function:ident($($what:expr),*)),* $(,)?) => {
        $(
            #[pg_test::harness_test(slow)]
            fn $test(harness: &pg_test::Harness) -> pg_test::Result<()> {
                $function(harness, $($what),*)
            }
        )*
    };
    ($($test:ident => $function:ident($($what:expr),*)),* $(,)?) => {
        $(
            #[pg_test::harness_test]
            fn $test(harness: &pg_test::Harness) -> pg_test::Result<()> {
                $function(harness, $($what),*)
            }
        )*
    };
}

automod::dir!("tests/suite");

fn main() -> std::process::ExitCode {
    pg_test::test_case::run_all(env!("CARGO_BIN_EXE_pg_test").as_ref())
}
