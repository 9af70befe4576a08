//! The metrics and alerts of docs/operations/monitoring, with Debian's exporter and Prometheus.

use crate::project::pages;
use pg_test::cluster::free_port;
use pg_test::process::{self, PATIENCE, wait_until};
use pg_test::runtime::{self, Runtime};
use pg_test::setup::{self, Package};
use pg_test::source_tree::source_root;
use pg_test::{Calls, Cluster, Context, Harness, Result, bail, ensure, harness_test};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

fn prometheus() -> Package {
    Package::new("prometheus", "/usr/bin/promtool").without_service("prometheus")
}

fn exporter() -> Package {
    let name = "prometheus-postgres-exporter";
    Package::new(name, format!("/usr/bin/{name}")).without_service(name)
}

fn file(name: &str) -> PathBuf {
    source_root().join("docs/operations/monitoring").join(name)
}

fn text(name: &str) -> Result<String> {
    Ok(fs::read_to_string(file(name))?)
}

/// Returns the words of a text that may be names of metrics or alerts.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Returns the queries of the dashboard's panels, with variables replaced as Grafana does.
fn queries_of_the_dashboard() -> Result<Vec<String>> {
    let dashboard: Value = serde_json::from_str(&text("dashboard.json")?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let queries = targets.filter_map(|target| target["expr"].as_str());
    Ok(queries
        .map(|query| query.replace("$datname", ".+").replace("$__rate_interval", "1m"))
        .collect())
}

/// Grafana's own library, of the oldest Grafana that the dashboard supports.
const GRAFANA: Runtime = Runtime::Python(&["grafana-foundation-sdk==1769699998!10.1.0"]);

/// Reports what that library does not read, or reads differently.
const READS: &str = r#"
import json, sys
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()
given = json.load(open(sys.argv[1]))
read = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))

def unread(given, read, path):
    if isinstance(given, dict) and isinstance(read, dict):
        return [one for key in given for one in unread(given[key], read.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [one for at, (g, r) in enumerate(zip(given, read)) for one in unread(g, r, f"{path}[{at}]")]
    return [] if given == read else [f"{path}: {given!r} is read as {read!r}"]

sys.exit("\n".join(unread(given, read, "dashboard")) or 0)
"#;

#[harness_test(slow)]
fn grafana_s_own_library_reads_all_of_the_dashboard(_: &Harness) -> Result<()> {
    let mut python = Command::new(runtime::fetch(GRAFANA)?.join("bin/python"));
    process::output_of(python.args(["-c", READS]).arg(file("dashboard.json"))).map(drop)
}

fn promtool(what: &str, file: &Path) -> Result<String> {
    process::output_of(Command::new("/usr/bin/promtool").args([what, "rules"]).arg(file))
}

#[harness_test]
fn the_rules_pass_their_unit_tests(_: &Harness) -> Result<()> {
    setup::ensure(&[prometheus()])?;
    promtool("check", &file("alerts.yaml"))?;
    promtool("test", &file("alerts_test.yaml"))?;
    let page = fs::read_to_string(source_root().join("docs/operations/monitoring.md"))?;
    let rules = text("alerts.yaml")?;
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        ensure!(page.contains(&format!("| `{alert}` |")), "the page does not list {alert}");
    }
    Ok(())
}

/// A program with an HTTP port of its own, killed when dropped.
struct Service {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Service {
    /// Starts the program and waits until `ready` can be fetched.
    fn start(mut command: Command, port: u16, log: PathBuf, ready: &str) -> Result<Service> {
        let output = fs::File::create(&log)?;
        process::as_server_user(&mut command)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let service = Service { child, port, log };
        let answers = wait_until("it serves", PATIENCE, || service.get(ready).is_ok());
        answers.with_context(|| service.log())?;
        Ok(service)
    }

    /// Starts postgres_exporter with only pg_fence's queries, as the role of the documentation.
    fn exporter(harness: &Harness, cluster: &Cluster) -> Result<Service> {
        let (dir, port) = (harness.install_dir().new_dir("exporter")?, free_port()?);
        let queries = dir.join("queries.yaml");
        fs::write(&queries, text("queries.yaml")?)?;
        let source = format!(
            "host=127.0.0.1 port={} user=prometheus dbname=postgres sslmode=disable",
            cluster.port()
        );
        let mut command = harness.rundir().command("/usr/bin/prometheus-postgres-exporter");
        command.env("DATA_SOURCE_NAME", source).args([
            "--disable-default-metrics",
            "--disable-settings-metrics",
            "--no-collector.database",
            "--no-collector.bgwriter",
            &format!("--extend.query-path={}", queries.display()),
            &format!("--web.listen-address=127.0.0.1:{port}"),
        ]);
        Service::start(command, port, dir.join("log"), "/metrics")
    }

    /// Starts Prometheus with pg_fence's rules. It scrapes the exporter every second or two.
    fn prometheus(harness: &Harness, exporter: &Service) -> Result<Service> {
        let (dir, port) = (harness.install_dir().new_dir("prometheus")?, free_port()?);
        fs::write(dir.join("alerts.yaml"), text("alerts.yaml")?)?;
        let settings = format!(
            "global: {{scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}}\n\
             rule_files: [alerts.yaml]\n\
             scrape_configs:\n  - job_name: postgres\n    static_configs:\n      \
             - targets: ['127.0.0.1:{}']\n",
            exporter.port
        );
        fs::write(dir.join("prometheus.yaml"), settings)?;
        let mut command = harness.rundir().command("/usr/bin/prometheus");
        command.args([
            format!("--config.file={}", dir.join("prometheus.yaml").display()),
            format!("--storage.tsdb.path={}", dir.join("data").display()),
            format!("--web.listen-address=127.0.0.1:{port}"),
            "--log.level=warn".to_owned(),
        ]);
        Service::start(command, port, dir.join("log"), "/-/ready")
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns the body of an existing page.
    fn get(&self, path: &str) -> Result<String> {
        let url = format!("http://127.0.0.1:{}{path}", self.port);
        process::output_of(Command::new("curl").args(["-fsSg", "--max-time", "120", &url]))
    }

    /// Returns the answer of Prometheus's API.
    fn api(&self, path: &str) -> Result<Value> {
        Ok(serde_json::from_str::<Value>(&self.get(&format!("/api/v1/{path}"))?)?["data"].take())
    }

    /// Returns the alert of that name if it fires.
    fn firing(&self, name: &str) -> Result<Option<Value>> {
        let data = self.api("alerts")?;
        let alerts = data["alerts"].as_array().context("no list of alerts")?;
        let found = |a: &&Value| a["labels"]["alertname"] == name && a["state"] == "firing";
        Ok(alerts.iter().find(found).cloned())
    }

    /// Returns how often Prometheus has scraped the counter of refusals with that SQLSTATE.
    fn samples(&self, sqlstate: &str) -> Result<usize> {
        // The range selector {sqlstate="…"}[5m], encoded for a URL.
        let query = format!("fence_refused_total%7Bsqlstate=%22{sqlstate}%22%7D%5B5m%5D");
        let data = self.api(&format!("query?query={query}"))?;
        Ok(data["result"][0]["values"].as_array().map_or(0, Vec::len))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(dir) = self.log.parent() {
            let _ = fs::remove_dir_all(dir);
        }
    }
}

/// Returns the names of the series in an exporter's page.
fn series(metrics: &str) -> BTreeSet<&str> {
    metrics.lines().filter(|line| !line.starts_with('#')).filter_map(|l| words(l).next()).collect()
}

/// Starts a server set up as the documentation says, and its exporter.
fn monitored(harness: &Harness) -> Result<(Cluster, Service)> {
    setup::ensure(&[prometheus(), exporter(), Package::new("curl", "/usr/bin/curl")])?;
    let cluster = harness.builder().start()?;
    cluster.connect("postgres")?.run("CREATE EXTENSION pg_fence")?;
    pages::play("docs/operations/monitoring.md", cluster.conninfo("postgres"))?;
    let exporter = Service::exporter(harness, &cluster)?;
    Ok((cluster, exporter))
}

#[harness_test]
fn every_series_is_exported_that_the_alerts_and_the_page_name(harness: &Harness) -> Result<()> {
    let (cluster, exporter) = monitored(harness)?;
    let mut admin = cluster.connect("postgres")?;
    // One lease is blocked by its guard after its end, and another has an acquire that is not committed.
    let mut holder = cluster.connect("postgres")?;
    let token = holder.acquire("report", "1 h")?;
    holder.run(&format!("BEGIN; SELECT lease_guard('report', {token})"))?;
    admin.run("SELECT lease_revoke('report')")?;
    let mut undecided = cluster.connect("postgres")?;
    undecided.run("BEGIN; SELECT lease_acquire('import', 'worker C')")?;
    admin.acquire_expired("forgotten")?;

    let metrics = exporter.get("/metrics")?;
    ensure!(metrics.contains("\npg_exporter_last_scrape_error 0\n"), "{}", exporter.log());
    let exported = series(&metrics);
    let rules = text("alerts.yaml")?;
    let expressions = rules.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    for name in expressions.flat_map(words).filter(|w| w.contains("fence_") || w.contains("pg_")) {
        ensure!(exported.contains(name), "an alert asks for {name}: {exported:?}");
    }
    for query in queries_of_the_dashboard()? {
        for name in words(&query).filter(|word| word.starts_with("fence_")) {
            ensure!(exported.contains(name), "the dashboard asks for {name}: {exported:?}");
        }
    }
    let page = fs::read_to_string(source_root().join("docs/operations/monitoring.md"))?;
    let ours: BTreeSet<&str> =
        exported.iter().copied().filter(|name| name.starts_with("fence_")).collect();
    let listed: BTreeSet<&str> = page
        .lines()
        .filter(|line| line.starts_with("| `fence_"))
        .filter_map(|line| line.split('|').nth(1))
        .flat_map(words)
        .collect();
    ensure!(ours == listed, "exported: {ours:?}; listed: {listed:?}");

    let value = |name: &str, labels: &[&str]| -> Result<f64> {
        let of_series = |line: &&str| {
            line.starts_with(&format!("{name}{{")) && labels.iter().all(|l| line.contains(l))
        };
        let line = metrics.lines().find(of_series).with_context(|| format!("no {name}"))?;
        Ok(line.rsplit_once(' ').context("no value")?.1.parse()?)
    };
    let report = ["lease=\"report\"", "state=\"free\"", &format!("pids=\"{}\"", holder.pid())];
    ensure!(value("fence_held_up_transactions", &report)? == 1.0, "{metrics}");
    ensure!(value("fence_held_up_seconds", &report)? >= 0.0, "{metrics}");
    let import = ["lease=\"import\"", "state=\"uncommitted\"", "holder=\"worker C\""];
    ensure!(value("fence_held_up_transactions", &import)? == 1.0, "{metrics}");
    ensure!(value("fence_expired_leases", &[])? == 1.0, "{metrics}");
    for (state, count) in
        [("uncommitted", 1.0), ("expired", 1.0), ("abandoned", 0.0), ("held", 0.0)]
    {
        let state = format!("state=\"{state}\"");
        ensure!(value("fence_leases_count", &[&state])? == count, "{state}: {metrics}");
    }
    let jumps: i64 = admin.granted("SELECT jumps FROM fence_status()")?;
    ensure!(value("fence_status_jumps", &[])? == jumps as f64, "{metrics}");
    ensure!(value("fence_status_versions_match", &[])? == 1.0, "{metrics}");

    // A query that fails is reported, and does not affect the others.
    admin.run("DROP MATERIALIZED VIEW monitoring.fence_audit")?;
    let metrics = exporter.get("/metrics")?;
    ensure!(metrics.contains("\npg_exporter_last_scrape_error 1\n"), "{metrics}");
    ensure!(series(&metrics).contains("fence_refused_total"), "{metrics}");
    Ok(())
}

#[harness_test]
fn a_frozen_worker_that_writes_too_late_raises_the_alert(harness: &Harness) -> Result<()> {
    let (cluster, exporter) = monitored(harness)?;
    let prometheus = Service::prometheus(harness, &exporter)?;
    let logs = || format!("{}\n{}", exporter.log(), prometheus.log());
    let mut admin = cluster.connect("postgres")?;
    admin.run(
        "CREATE TABLE orders (id bigint PRIMARY KEY, status text); INSERT INTO orders VALUES (7, 'new');
         SELECT fence_protect('orders', lease => 'order:{id}'); SELECT fence_stats_reset()",
    )?;
    // An increase is visible only after an earlier value.
    wait_until("Prometheus looks", PATIENCE, || prometheus.samples("PF001").is_ok_and(|n| n >= 2))
        .with_context(logs)?;
    ensure!(prometheus.firing("FenceWriteRefused")?.is_none(), "it fires before anything happens");

    let mut frozen = harness.worker("worker A", &cluster.conninfo("postgres"))?;
    let old = frozen.number("SELECT lease_acquire('order:7', 'worker A', '1 s')")?;
    let old = old.context("the lease is taken")?;
    frozen.freeze()?;
    let late = format!("UPDATE orders SET status = 'paid', fence = {old} WHERE id = 7");
    frozen.send(&late)?;
    admin.wait_expired("order:7")?;
    let new = admin.granted("SELECT lease_acquire('order:7', 'worker B', '1 h')")?;
    admin.run(&format!("UPDATE orders SET status = 'sent', fence = {new} WHERE id = 7"))?;
    frozen.thaw()?;
    match frozen.outcome(PATIENCE)? {
        Err(fault) => ensure!(fault.sqlstate == "PF001", "{fault}"),
        Ok(rows) => bail!("the late write landed: {rows:?}"),
    }

    let mut alert = None;
    wait_until("the alert fires", PATIENCE, || {
        alert = prometheus.firing("FenceWriteRefused").ok().flatten();
        alert.is_some()
    })
    .with_context(logs)?;
    let alert = alert.context("no alert")?;
    ensure!(alert["labels"]["sqlstate"] == "PF001", "{alert}");
    ensure!(alert["labels"]["datname"] == "postgres", "{alert}");
    let description = alert["annotations"]["description"].as_str().unwrap_or_default();
    ensure!(description.contains("public.orders by worker A;"), "{alert}");

    for query in queries_of_the_dashboard()? {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let answer =
            prometheus.api(&format!("query?query={encoded}")).with_context(|| query.clone())?;
        let is_empty = answer["result"].as_array().is_none_or(Vec::is_empty);
        // No session blocks another one here.
        ensure!(!is_empty || query.starts_with("fence_held_up"), "{query}: {answer}");
    }

    ensure!(admin.text("SELECT status FROM orders")?.as_deref() == Some("sent"));
    Ok(())
}
