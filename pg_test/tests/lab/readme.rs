//! Every SQL example of the README.

pg_test::trials![];
