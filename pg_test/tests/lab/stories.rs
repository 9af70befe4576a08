//! The stories that the extension exists for, with real worker processes.

pg_test::trials![];
