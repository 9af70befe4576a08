//! What errors say, what they keep secret, and their encoding. (The tests that are not in a file of the folder:
//! errors.script.)

automod::dir!(pub "tests/suite/errors");
