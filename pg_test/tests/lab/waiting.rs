//! Waiting: for a grant in the queue, for an open transaction; and tries, which never wait.

automod::dir!(pub "tests/lab/waiting");
