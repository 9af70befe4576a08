//! The whole at work: stories, crowds of sessions, chaos, and the clients in other languages.

automod::dir!(pub "tests/lab/scenarios");
