//! Waiting in line.

pg_test::trials![];
