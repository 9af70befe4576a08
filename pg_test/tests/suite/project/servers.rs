//! The servers that tests start.

use pg_test::cluster::Cluster;
use pg_test::process::{PATIENCE, wait_until};
use pg_test::{Context, Harness, Result, ensure, harness_test};
use std::net::TcpListener;

/// Checks that the server runs, and that connections to its port reach it.
fn is_itself(server: &Cluster) -> Result<()> {
    let directory = server.connect("postgres")?.text("SHOW data_directory")?.context("nothing")?;
    ensure!(directory == server.data().to_string_lossy(), "that is the server of {directory}");
    Ok(())
}

/// The port may belong to a process that never answers, or to another PostgreSQL that accepts the connection.
#[harness_test]
fn a_server_whose_port_is_taken_is_started_on_another(harness: &Harness) -> Result<()> {
    let server = harness.builder().create()?;
    let first = server.port();
    // (If this fails, the port is taken all the same.)
    let _silent = TcpListener::bind(("127.0.0.1", first));
    server.start()?;
    ensure!(server.port() != first, "it has the port that is taken");
    is_itself(&server)?;

    let late = harness.builder().create()?;
    let (first, answers) = (late.port(), late.conninfo("postgres"));
    server.stop()?;
    server.configure(&[("port", &first.to_string())])?;
    server.start_without_waiting()?;
    wait_until("the other one lets in", PATIENCE, || answers.connect().is_ok())?;
    late.start()?;
    ensure!(late.port() != first, "it has the port that is taken");
    is_itself(&late)?;

    // From then on its clients know its port.
    let known = late.port();
    late.stop()?;
    let _silent = TcpListener::bind(("127.0.0.1", known));
    let refused = late.start().err().context("it has started")?;
    ensure!(format!("{refused:#}").contains("Address already in use"), "{refused:#}");
    ensure!(late.port() == known, "it has moved");
    Ok(())
}
