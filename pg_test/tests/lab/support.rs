//! What the tests have in common: databases, concurrent sessions, and what holds for many of them.

automod::dir!(pub "tests/lab/support");
