//! All parts together: demo scenarios, many sessions at once, chaos, and the clients in other languages.

automod::dir!(pub "tests/suite/scenarios");
