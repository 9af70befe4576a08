//! Waits for a grant in the queue and for an open transaction, and attempts that never wait.

automod::dir!(pub "tests/suite/waiting");
