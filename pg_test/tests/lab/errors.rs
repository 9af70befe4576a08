//! Errors as a real client sees them.

pg_test::trials![];
