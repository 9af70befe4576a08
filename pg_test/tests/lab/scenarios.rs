//! The whole at work: stories, races, isolation specs, chaos, a soak, and the clients in other languages.

automod::dir!(pub "tests/lab/scenarios");
