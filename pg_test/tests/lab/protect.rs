//! `fence_audit`.

pg_test::trials![];
