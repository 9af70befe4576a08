//! What an error says, keeps secret, and in which encoding. (The tests that are not in a file of the folder: errors.script.)

automod::dir!(pub "tests/lab/errors");
