//! The laboratory of pg_fence: everything that tests, shows or measures the extension.
//!
//! A [`Lab`] is one run of it: a private copy of PostgreSQL with the extension installed, one
//! server that the tests share, and a run directory that vanishes with the process, however it
//! ends. Nothing on the machine is changed but the Debian packages that [`setup`] adds.
//!
//! | module | its noun |
//! | --- | --- |
//! | [`setup`] | the Debian packages that are needed |
//! | [`edition`] | which edition the tests judge |
//! | [`source_tree`] | the source tree, and cargo in it |
//! | [`extension`] | the built extension: library, control file, scripts |
//! | [`rundir`] | the run directory and the watchdog that clears it |
//! | [`prefix`] | a private, relocated copy of PostgreSQL |
//! | [`clock`] | a server whose clock can be stepped |
//! | [`cluster`] | one server: start, stop, kill, promote |
//! | [`database`] | a database of a test's own, and its roles |
//! | [`client`] | where to connect, and a session |
//! | [`calls`] | the calls on leases, in short |
//! | [`fault`] | an error as a client sees it |
//! | [`background`] | a session in a thread, to see it wait |
//! | [`cable`] | a network of its own for a client, to be cut |
//! | [`pooler`] | PgBouncer in front of a server |
//! | [`worker`] | a worker process, to freeze and to kill |
//! | [`majors`] | PostgreSQL of each major version, from where it is to be had |
//! | [`markdown`] | the pages, taken apart |
//! | [`matrix`] | the whole suite on each of them |
//! | [`dropped_files`] | what the log says of files that are gone |
//! | [`debian_releases`] | packages of other releases of Debian than the machine's own |
//! | [`debian_binary`] | PostgreSQL and Python out of Debian's packages, of whichever release |
//! | [`debian_source`] | programs built from Debian's source packages |
//! | [`wheel`] | PostgreSQL 16, fetched from PyPI and npm |
//! | [`candidate`] | PostgreSQL that is not released yet: what the extension is built for it with |
//! | [`cassert`] | PostgreSQL with assertions, and the suite run on it |
//! | [`book`] | the pages as a book |
//! | [`package`] | packages to install where there is no Rust |
//! | [`orm`] | libraries that map tables to objects |
//! | [`citus`] | a coordinator, and workers among which tables are spread |
//! | [`patroni`] | a cluster that fails over by itself |
//! | [`process`] | processes of the machine |
//! | [`promises`] | what is promised, and the tests that show it |
//! | [`rules`] | the extension's own rules, to be tested and model-checked without a server |
//! | [`mod@script`] | tests of the lab that are SQL and what must come of it, in text files |
//! | [`script_rules`] | the rules for scripts of extensions |
//! | [`service`] | lock services of others |
//! | [`standstill`] | times for which the machine stood still |
//! | [`mod@test_case`] | a test of the lab |
//! | [`story_run`], [`timeline`] | one run of a story, and how it is shown |
//! | [`stories`] | what the extension is for, played by worker processes |
//! | [`clients`] | the clients in other languages, and the scenarios they go through |
//! | [`chaos`] | workers under a nemesis, and the judge |
//! | [`demo`] | the demonstration |
//!
//! Measurements beside what else one could take are a package of their own, `pg_test/bench`.

pub mod background;
pub mod book;
pub mod cable;
pub mod calls;
pub mod candidate;
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
pub mod dropped_files;
pub mod edition;
pub mod extension;
pub mod fault;
pub mod installation;
pub mod killed_server;
mod lab;
pub mod majors;
pub mod markdown;
pub mod matrix;
pub mod orm;
pub mod package;
pub mod patroni;
pub mod pooler;
pub mod prefix;
pub mod process;
pub mod promises;
pub mod rundir;
pub mod script;
pub mod script_rules;
pub mod service;
pub mod setup;
pub mod source_tree;
pub mod standstill;
pub mod stories;
pub mod story_run;
pub mod test_case;
pub mod timeline;
pub mod wheel;
pub mod worker;

pub use anyhow::{bail, ensure, Context, Result};
pub use background::Background;
pub use calls::Calls;
pub use client::{Conninfo, Rows, Session};
pub use cluster::Cluster;
pub use database::Database;
pub use fault::Fault;
pub use inventory;
pub use lab::Lab;
pub use pg_fence_rules as rules;
pub use pg_test_macros::lab_test;
pub use test_case::TestCase;
pub use worker::Worker;
