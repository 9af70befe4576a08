//! Guarded transactions.

pg_test::trials![];
