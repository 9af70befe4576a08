//! The whole at work: stories, races, isolation specs, chaos, and the clients in other languages.

automod::dir!(pub "tests/lab/scenarios");
