//! Who may do what, and attacks that fail.

pg_test::trials![];
