//! To come.

pg_test::trials![];
