//! The trigger: what a write presents, and what comes of it. (The tests are in the script beside this.)

automod::dir!(pub "tests/lab/fence");
