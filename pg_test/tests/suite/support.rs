//! Shared by the tests: databases, concurrent sessions, and common checks.

automod::dir!(pub "tests/suite/support");
