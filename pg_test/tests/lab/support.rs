//! Shared by the tests: databases, concurrent sessions, and what holds for many of them.

automod::dir!(pub "tests/lab/support");
