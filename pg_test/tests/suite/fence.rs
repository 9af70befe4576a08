//! The trigger: how a write presents a token, and what is decided. (The tests are in the scenario file of this name.)

automod::dir!(pub "tests/suite/fence");
