//! Deterministic races: isolation specs.

pg_test::trials![];
