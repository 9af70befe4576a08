//! All tests that need a server, in one program with one shared server. A function marked with `#[lab_test]` is one.
//!
//! A folder is a topic, and the file of its name says which. `automod` makes a module of every file: none is listed.

/// Tests that differ only in what they hand to a function: `name => function(what)`.
macro_rules! cases {
    (slow: $($test:ident => $function:ident($($what:expr),*)),* $(,)?) => {
        $(
            #[pg_test::lab_test(slow)]
            fn $test(lab: &pg_test::Lab) -> pg_test::Result<()> {
                $function(lab, $($what),*)
            }
        )*
    };
    ($($test:ident => $function:ident($($what:expr),*)),* $(,)?) => {
        $(
            #[pg_test::lab_test]
            fn $test(lab: &pg_test::Lab) -> pg_test::Result<()> {
                $function(lab, $($what),*)
            }
        )*
    };
}

automod::dir!("tests/lab");

fn main() -> std::process::ExitCode {
    pg_test::test_case::run_all(env!("CARGO_BIN_EXE_pg_test").as_ref())
}
