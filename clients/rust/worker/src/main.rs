//! The worker of the scenarios in Rust. It reads orders, one JSON object a line, carries them out,
//! and writes an answer for each.
//!
//! Orders and answers are the same for the clients of all languages. `clients/new-language.md`
//! describes them.

use pg_fence_client::{
    Adopted, BoxError, Connected, Error, Event, EventKind, Fence, Guard, Lease, classify, connect,
    options,
};
use serde_json::{Value, json};
use std::error::Error as StdError;
use std::future::Future;
use std::io::BufRead;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::{Config, NoTls};
use tokio_util::sync::CancellationToken;

/// Takes the row of the table `run`, if nobody holds it.
const CLAIM: &str = "UPDATE run SET held_until = clock_timestamp() + $1::bigint * interval '1 ms' WHERE id = (
    SELECT id FROM run WHERE held_until IS NULL OR held_until < clock_timestamp() FOR UPDATE SKIP LOCKED)
    RETURNING fence";

type Outcome = Result<(), BoxError>;
type Orders = mpsc::UnboundedReceiver<Value>;

struct Logger;

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.target().starts_with("pg_fence") && metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            eprintln!("{}", record.args());
        }
    }

    fn flush(&self) {}
}

fn main() -> Outcome {
    log::set_logger(&Logger).map_err(|error| error.to_string())?;
    log::set_max_level(log::LevelFilter::Warn);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(serve())
}

async fn serve() -> Outcome {
    let (send, mut orders) = mpsc::unbounded_channel();
    // Tokio's standard input would count as a task, and would keep the process from ending.
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let Ok(order) = serde_json::from_str(&line) else { return };
            if send.send(order).is_err() {
                return;
            }
        }
    });
    let mut terminated = signal(SignalKind::terminate())?;
    let place = orders.recv().await.ok_or("no order")?;
    let mut worker = Worker::new(&place)?;
    say("connected", json!({}));
    loop {
        // As in the README: whatever ends the program, the fence is closed.
        let order = tokio::select! {
            order = orders.recv() => order,
            _ = terminated.recv() => None,
        };
        let Some(order) = order else { break };
        if let Err(error) = worker.carry_out(&order, &mut orders).await {
            say_error(error.as_ref());
        }
    }
    worker.fence.close().await;
    Ok(())
}

// Answers.

fn now_ms() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()
}

fn say(event: &str, more: Value) {
    let mut answer = json!({ "event": event, "at": now_ms() as u64 });
    if let (Some(answer), Value::Object(more)) = (answer.as_object_mut(), more) {
        answer.extend(more);
    }
    println!("{answer}");
}

/// The end of the client's window, in milliseconds since 1970.
fn deadline(wall_ms: u128, remaining: Duration) -> u64 {
    (wall_ms + remaining.as_millis()) as u64
}

fn say_granted(event: &str, lease: &Lease) {
    let wall = now_ms();
    say(event, json!({ "token": lease.token(), "deadline": deadline(wall, lease.remaining()) }));
}

fn say_error(error: &(dyn StdError + 'static)) {
    let typed = classify(error);
    let typed = typed.as_ref().or(error.downcast_ref());
    let state = typed.and_then(Error::sqlstate);
    let kind = match typed {
        Some(Error::TransactionLost { in_doubt: true, .. }) => "in-doubt",
        Some(Error::TransactionLost { .. }) => "transaction-lost",
        Some(Error::LeaseTaken { .. }) => "taken",
        Some(Error::LeaseLost { .. }) => "lost",
        Some(Error::NotInstalled(_)) => "not-installed",
        Some(Error::NotGranted { .. }) => "not-granted",
        Some(Error::NoAnswer { .. } | Error::NoConnection(..)) => "no-answer",
        Some(_) if state.is_some() => "refused",
        _ => match error.downcast_ref() {
            Some(WorkerError::Nothing) => "lost",
            Some(WorkerError::Deadline) => "deadline",
            _ => "other",
        },
    };
    say("refused", json!({ "error": kind, "sqlstate": state, "message": error.to_string() }));
}

/// An error of the worker itself.
#[derive(Debug)]
enum WorkerError {
    /// The order needs a lease, or a transaction.
    Nothing,
    Deadline,
    Failure,
}

impl std::fmt::Display for WorkerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            WorkerError::Nothing => "there is no lease, or its transaction has ended",
            WorkerError::Deadline => "the caller's own deadline has passed",
            WorkerError::Failure => "an error of the work's own",
        })
    }
}

impl StdError for WorkerError {}

/// The lease or the adopted lease that guards the worker's writes.
#[derive(Clone)]
enum Held {
    Lease(Lease),
    Adopted(Adopted),
}

impl Held {
    async fn guard<'c>(&self, connection: &'c mut Connected) -> Result<Guard<'c>, Error> {
        match self {
            Held::Lease(lease) => lease.guard(connection).await,
            Held::Adopted(adopted) => adopted.guard(connection).await,
        }
    }
}

// Orders.

struct Worker {
    config: Config,
    url: String,
    fence: Fence,
    /// The table that it writes: `run` while it keeps a row, and otherwise `work`.
    table: &'static str,
    /// True if the next opening of a connection of the fence panics.
    is_broken: Arc<AtomicBool>,
    /// The lease that it has, also as a leader.
    held: Arc<Mutex<Option<Held>>>,
    leading: Option<JoinHandle<()>>,
    stop: CancellationToken,
    /// What the work of a leader does next: `returns`, `fails` or `loses-connection`.
    work: Arc<Mutex<Option<String>>>,
    /// The leases of the order `hold`, whose renewals are not reported.
    crowd: Vec<Lease>,
    crowd_names: Arc<Mutex<Vec<String>>>,
}

impl Worker {
    fn new(place: &Value) -> Result<Worker, BoxError> {
        let part = |key: &str| place[key].to_string().replace('"', "");
        let url = format!(
            "host={} port={} user={} dbname={} application_name={}",
            part("host"),
            part("port"),
            part("user"),
            part("dbname"),
            part("application")
        );
        let crowd_names: Arc<Mutex<Vec<String>>> = Arc::default();
        let crowd = crowd_names.clone();
        let is_broken: Arc<AtomicBool> = Arc::default();
        let (broken, to) = (is_broken.clone(), url.clone());
        let fence = Fence::with_opener(move || {
            assert!(!broken.swap(false, Ordering::Relaxed), "broken");
            let to = to.clone();
            async move { connect(&to, NoTls).await }
        });
        let fence = fence.on_event(move |event| say_event(event, &lock(&crowd)));
        Ok(Worker {
            config: url.parse()?,
            url,
            fence,
            table: "work",
            is_broken,
            held: Arc::default(),
            leading: None,
            stop: CancellationToken::new(),
            work: Arc::default(),
            crowd: Vec::new(),
            crowd_names,
        })
    }

    async fn carry_out(&mut self, order: &Value, orders: &mut Orders) -> Outcome {
        match order["do"].as_str().unwrap_or_default() {
            "acquire" => return self.acquire(order).await,
            "claim" => return self.claim(order).await,
            "hold" => return self.hold(order).await,
            "holding" => self.say_holding(),
            "release-all" => {
                for lease in std::mem::take(&mut self.crowd) {
                    // A loss was reported before, by its event.
                    let _ = lease.release().await;
                }
                say("released", json!({}));
            }
            "adopted" => {
                let name = order["name"].as_str().unwrap_or_default();
                let token = order["token"].as_i64().unwrap_or_default();
                *lock(&self.held) = Some(Held::Adopted(self.fence.adopted(name, token)));
                self.table = "work";
                say("adopted", json!({ "token": token }));
            }
            "check" => {
                if let Held::Lease(lease) = self.held()? {
                    lease.check()?;
                }
                say("held", json!({}));
            }
            "release" => {
                if let Held::Lease(lease) = self.held()? {
                    lease.check()?;
                    lease.release().await?;
                }
                say("released", json!({}));
            }
            "write" => return self.write(order, &self.update(order)).await,
            "truncate" => return self.write(order, "TRUNCATE work").await,
            "unfenced" => {
                let client = connect(&self.url, NoTls).await?;
                client.batch_execute(&self.update(order)).await?;
                client.close().await;
                say("wrote", json!({}));
            }
            which @ ("guard" | "guard-all") => {
                let mut client = connect(&self.url, NoTls).await?;
                let guard = match which {
                    "guard" => self.held()?.guard(&mut client).await?,
                    _ => self.fence.guard(&mut client, &self.crowd).await?,
                };
                self.steps(guard, orders).await?;
                client.close().await;
            }
            "present" => return self.present(orders).await,
            which @ ("break" | "lead" | "work" | "stop") => {
                match which {
                    "break" => self.is_broken.store(true, Ordering::Relaxed),
                    "lead" => self.lead(order),
                    "work" => *lock(&self.work) = order["how"].as_str().map(str::to_owned),
                    _ => self.stop.cancel(),
                }
                say("done", json!({}));
            }
            "census" => say("census", json!({ "tasks": census() })),
            "close" => self.close().await,
            "update" | "sleep" | "commit" | "rollback" | "commit-itself" | "fail-and-go-on" => {
                return Err(WorkerError::Nothing.into());
            }
            _ => return Err("unknown order".into()),
        }
        Ok(())
    }

    fn held(&self) -> Result<Held, WorkerError> {
        lock(&self.held).clone().ok_or(WorkerError::Nothing)
    }

    /// Releases the lease that it has, unless it is adopted.
    async fn release_held(&mut self) {
        let before = lock(&self.held).take();
        if let Some(Held::Lease(lease)) = before {
            // A loss was reported before, by its event.
            let _ = lease.release().await;
        }
        self.table = "work";
    }

    async fn claim(&mut self, order: &Value) -> Outcome {
        self.release_held().await;
        let client = connect(&self.url, NoTls).await?;
        let ttl_ms = order["ttl_ms"].as_i64().unwrap_or_default();
        let claimed = client.query_opt(CLAIM, &[&ttl_ms]).await?;
        client.close().await;
        let Some(row) = claimed else {
            say("taken", json!({}));
            return Ok(());
        };
        let ttl = ms(&order["ttl_ms"]);
        let lease = self.fence.keep_row("run", &[("id", &1)], row.get(0), ttl).acquire().await?;
        say_granted("acquired", &lease);
        *lock(&self.held) = Some(Held::Lease(lease));
        self.table = "run";
        Ok(())
    }

    /// Returns an UPDATE without arguments: it need not be prepared, which poolers do not support.
    fn update(&self, order: &Value) -> String {
        let value = order["value"].as_str().unwrap_or_default();
        format!("UPDATE {} SET value = '{value}' WHERE id = 1", self.table)
    }

    async fn acquire(&mut self, order: &Value) -> Outcome {
        self.release_held().await;
        let mut request = self.fence.lease(names(order)).ttl(ms(&order["ttl_ms"]));
        request = request.wait(ms(&order["wait_ms"]));
        if order["session"] == true {
            request = request.session();
        }
        if order["shared"] == true {
            request = request.shared();
        }
        if let Some(slots) = order["slots"].as_i64() {
            request = request.slots(slots.try_into()?);
        }
        if let Some(holder) = order["holder"].as_str() {
            let reclaims = order["reclaim"] == true;
            request = if reclaims { request.reclaim(holder) } else { request.holder(holder) };
        }
        match within(order, request.acquire()).await? {
            Ok(lease) => {
                say_granted("acquired", &lease);
                *lock(&self.held) = Some(Held::Lease(lease));
            }
            Err(Error::LeaseTaken { .. }) => say("taken", json!({})),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    // Many leases.

    async fn hold(&mut self, order: &Value) -> Outcome {
        lock(&self.crowd_names).extend(names(order));
        for name in names(order) {
            match self.fence.lease(name).ttl(ms(&order["ttl_ms"])).acquire().await {
                Ok(lease) => self.crowd.push(lease),
                Err(Error::LeaseTaken { .. }) => {
                    say("taken", json!({}));
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.say_holding();
        Ok(())
    }

    fn say_holding(&self) {
        let held = self.crowd.iter().filter(|lease| lease.held()).count();
        say("holding", json!({ "count": held }));
    }

    // Transactions.

    /// Runs a statement in a guard, and commits. With `release` the commit also releases the lease.
    async fn write(&mut self, order: &Value, sql: &str) -> Outcome {
        let held = self.held()?;
        let mut client = connect(&self.url, NoTls).await?;
        if order["read_first"] == true {
            client.batch_execute("SELECT 1").await?;
        }
        let guard = held.guard(&mut client).await?;
        guard.batch_execute(sql).await?;
        if order["release"] == true {
            guard.commit_and_release().await?;
        } else {
            guard.commit().await?;
        }
        client.close().await;
        say("wrote", json!({}));
        Ok(())
    }

    /// Carries out the orders of one transaction, until `commit` or `rollback`.
    async fn steps(&self, mut guard: Guard<'_>, orders: &mut Orders) -> Outcome {
        say("guarded", json!({}));
        loop {
            let order = orders.recv().await.ok_or("no order")?;
            match order["do"].as_str().unwrap_or_default() {
                "guard" => {
                    let Held::Lease(lease) = self.held()? else {
                        return Err(WorkerError::Nothing.into());
                    };
                    let inner = lease.guard(&mut guard).await?;
                    Box::pin(self.steps(inner, orders)).await?;
                }
                "check" => {
                    if let Held::Lease(lease) = self.held()? {
                        lease.check()?;
                    }
                    say("held", json!({}));
                }
                "commit" => {
                    guard.commit().await?;
                    say("committed", json!({}));
                    return Ok(());
                }
                "rollback" => {
                    drop(guard);
                    say("rolled-back", json!({}));
                    return Ok(());
                }
                "commit-itself" => {
                    guard.batch_execute("COMMIT").await?;
                    say("done", json!({}));
                }
                "fail-and-go-on" => {
                    let _ = guard.batch_execute("SELECT 1 / 0").await;
                    say("done", json!({}));
                }
                _ => {
                    let (sql, answer) = self.step(&order)?;
                    within(&order, guard.batch_execute(&sql)).await??;
                    say(answer, json!({}));
                }
            }
        }
    }

    async fn present(&self, orders: &mut Orders) -> Outcome {
        let Held::Lease(lease) = self.held()? else { return Err(WorkerError::Nothing.into()) };
        let mut config = self.config.clone();
        config.options(options(&lease));
        let (client, connection) = config.connect(NoTls).await?;
        let connected = Connected::new(client, connection);
        connected.batch_execute("BEGIN").await?;
        say("presented", json!({}));
        loop {
            let (sql, answer) = self.step(&orders.recv().await.ok_or("no order")?)?;
            connected.batch_execute(&sql).await?;
            say(answer, json!({}));
            if matches!(answer, "committed" | "rolled-back") {
                return Ok(());
            }
        }
    }

    /// Returns the statement of an order within a transaction, and the answer to the order.
    fn step(&self, order: &Value) -> Result<(String, &'static str), BoxError> {
        match order["do"].as_str().unwrap_or_default() {
            "update" => Ok((self.update(order), "updated")),
            "commit" => Ok(("COMMIT".to_owned(), "committed")),
            "rollback" => Ok(("ROLLBACK".to_owned(), "rolled-back")),
            // The sleep is in the server, so that the connection hangs.
            "sleep" => {
                Ok((format!("SELECT pg_sleep({})", ms(&order["ms"]).as_secs_f64()), "slept"))
            }
            _ => Err("unknown order".into()),
        }
    }

    // Leading.

    fn lead(&mut self, order: &Value) {
        self.stop = CancellationToken::new();
        *lock(&self.work) = None;
        let (fence, stop, held) = (self.fence.clone(), self.stop.clone(), self.held.clone());
        let (next, url) = (self.work.clone(), self.url.clone());
        let name = order["name"].as_str().unwrap_or_default().to_owned();
        let ttl = ms(&order["ttl_ms"]);
        self.leading = Some(tokio::spawn(async move {
            let work = |lease: Lease| {
                say_granted("leading", &lease);
                *lock(&held) = Some(Held::Lease(lease.clone()));
                lead_work(stop.clone(), next.clone(), url.clone())
            };
            match fence.lead(&name, ttl, &stop, work).await {
                Ok(_) => say("stopped", json!({})),
                Err(error) if error.is::<WorkerError>() => {
                    say("stopped", json!({ "reason": "fails" }))
                }
                Err(error) => say("stopped", json!({ "reason": error.to_string() })),
            }
        }));
    }

    async fn close(&mut self) {
        self.stop.cancel();
        if let Some(leading) = self.leading.take() {
            let _ = leading.await;
        }
        self.fence.close().await;
        *lock(&self.held) = None;
        self.crowd.clear();
        say("closed", json!({}));
    }
}

/// The work of a leader, which ends after a stop, or as an order says.
async fn lead_work(
    stop: CancellationToken,
    next: Arc<Mutex<Option<String>>>,
    url: String,
) -> Outcome {
    while !stop.is_cancelled() {
        let next = lock(&next).take();
        match next.as_deref() {
            Some("returns") => return Ok(()),
            Some("fails") => return Err(WorkerError::Failure.into()),
            Some("loses-connection") => {
                let client = connect(&url, NoTls).await?;
                client.batch_execute("SELECT pg_terminate_backend(pg_backend_pid())").await?;
            }
            _ => {}
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

fn say_event(event: &Event, crowd: &[String]) {
    let (wall, name) = (now_ms(), &event.names[0]);
    match event.kind {
        EventKind::Lost(reason) => {
            say("lost", json!({ "name": name, "reason": reason.to_string() }))
        }
        EventKind::Renewed if !crowd.contains(name) => {
            let deadline = deadline(wall, event.remaining);
            say("renewed", json!({ "token": event.token, "deadline": deadline }));
        }
        _ => {}
    }
}

/// Returns the result of `work`, or an error after the `within_ms` of the order.
async fn within<T>(order: &Value, work: impl Future<Output = T>) -> Result<T, WorkerError> {
    if !order["within_ms"].is_u64() {
        return Ok(work.await);
    }
    tokio::time::timeout(ms(&order["within_ms"]), work).await.map_err(|_| WorkerError::Deadline)
}

fn names(order: &Value) -> Vec<String> {
    let names = order["names"].as_array().into_iter().flatten().filter_map(Value::as_str);
    names.map(str::to_owned).collect()
}

fn ms(value: &Value) -> Duration {
    Duration::from_millis(value.as_u64().unwrap_or(0))
}

/// The number of tasks, threads and open files, which include sockets.
fn census() -> usize {
    let count = |path: &str| std::fs::read_dir(path).map_or(0, Iterator::count);
    Handle::current().metrics().num_alive_tasks()
        + count("/proc/self/fd")
        + count("/proc/self/task")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
