//! The laboratory's worker in Rust: does what it reads, a JSON object a line, and says what became of it.
//!
//! What it is told and what it says is the same for the clients of all languages, and written down in
//! `clients/README.md`. `--plant` builds in a known fault, which the laboratory must catch.

mod observed;

use observed::{Observed, RENEW_IN_WORK};
use pg_fence_client::{
    Adopted, Connected, Error, Fence, Guarded, Lease, LeaseLost, classify, connect, guard_all,
};
use serde_json::{Value, json};
use std::error::Error as StdError;
use std::io::BufRead;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_postgres::NoTls;
use tokio_postgres::types::Type;

type Outcome = Result<(), Box<dyn StdError>>;
type Orders = mpsc::UnboundedReceiver<Value>;

fn main() -> Outcome {
    let plant = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => None,
        [flag, plant] if flag == "--plant" => Some(plant.clone()),
        _ => return Err("what?".into()),
    };
    let observed = Arc::new(Observed::new(plant.as_deref())?);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(serve(observed))
}

async fn serve(observed: Arc<Observed>) -> Outcome {
    let (send, mut orders) = mpsc::unbounded_channel();
    // Tokio's own standard input would be counted as a task, and keep the process from ending.
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let Ok(order) = serde_json::from_str(&line) else { return };
            if send.send(order).is_err() {
                return;
            }
        }
    });
    let place = orders.recv().await.ok_or("no order")?;
    let mut worker = Worker::new(&place, observed)?;
    say("connected", json!({}));
    while let Some(order) = orders.recv().await {
        if let Err(error) = worker.follow(&order, &mut orders).await {
            refused(error.as_ref());
        }
    }
    Ok(())
}

// What it says

fn now_ms() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()
}

fn say(event: &str, more: Value) {
    let mut said = json!({ "event": event, "at": now_ms() as u64 });
    if let (Some(said), Value::Object(more)) = (said.as_object_mut(), more) {
        said.extend(more);
    }
    println!("{said}");
}

/// Until when a lease is believed to be held, in milliseconds since 1970.
fn until(wall_ms: u128, remaining: Duration) -> u64 {
    (wall_ms + remaining.as_millis()) as u64
}

fn say_granted(event: &str, lease: &Lease) {
    let wall = now_ms();
    say(event, json!({ "token": lease.token(), "deadline": until(wall, lease.remaining()) }));
}

fn refused(error: &(dyn StdError + 'static)) {
    let told = classify(error);
    let kind = match &told {
        None if error.is::<Nothing>() => "lost",
        Some(Error::StaleToken(_)) => "stale",
        Some(Error::NoToken(_)) => "no-token",
        Some(Error::NeverIssued(_)) => "never-issued",
        Some(Error::NotSpeaking(_)) => "not-speaking",
        Some(Error::CannotBeFenced(_)) => "cannot-be-fenced",
        Some(Error::LeaseLost(_)) => "lost",
        Some(Error::TransactionLost(_)) => "transaction-lost",
        _ => "other",
    };
    let ours = told.as_ref().or(error.downcast_ref());
    let sqlstate = ours.and_then(Error::sqlstate);
    say("refused", json!({ "error": kind, "sqlstate": sqlstate, "message": error.to_string() }));
}

/// As the common page calls an order that has no lease or no transaction.
#[derive(Debug)]
struct Nothing;

impl std::fmt::Display for Nothing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("there is no lease, or its transaction has ended")
    }
}

impl StdError for Nothing {}

/// What it writes under.
#[derive(Clone)]
enum Held {
    Lease(Lease),
    Adopted(Adopted),
}

impl Held {
    async fn guard<'c>(&self, connection: &'c mut Connected) -> Result<Guarded<'c>, Error> {
        match self {
            Held::Lease(lease) => lease.guard(connection).await,
            Held::Adopted(adopted) => adopted.guard(connection).await,
        }
    }

    async fn present<'c>(&self, connection: &'c mut Connected) -> Result<Guarded<'c>, Error> {
        match self {
            Held::Lease(lease) => lease.present(connection).await,
            Held::Adopted(adopted) => adopted.present(connection).await,
        }
    }

    async fn release(&self) -> Result<(), LeaseLost> {
        match self {
            Held::Lease(lease) => lease.release().await,
            Held::Adopted(adopted) => adopted.release().await,
        }
    }
}

// What it is told

struct Worker {
    url: String,
    fence: Fence,
    observed: Arc<Observed>,
    /// The leader's, too.
    held: Arc<Mutex<Option<Held>>>,
    leading: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
    /// Of `hold` and `claim`.
    crowd: Vec<Lease>,
    observing: Option<JoinHandle<()>>,
}

impl Worker {
    fn new(place: &Value, observed: Arc<Observed>) -> Result<Worker, Box<dyn StdError>> {
        let part = |key: &str| place[key].to_string().replace('"', "");
        let url = format!(
            "host={} port={} user={} dbname={} application_name={}",
            part("host"),
            part("port"),
            part("user"),
            part("dbname"),
            part("application")
        );
        let fence = Fence::new(&url)?.with_hooks(observed.clone());
        let (held, crowd) = (Arc::default(), Vec::new());
        Ok(Worker { url, fence, observed, held, leading: None, crowd, observing: None })
    }

    async fn follow(&mut self, order: &Value, orders: &mut Orders) -> Outcome {
        match order["do"].as_str().unwrap_or_default() {
            "acquire" => return self.acquire(order).await,
            "resume" => return self.resume(order).await,
            "detach" => {
                let lease = self.held_lease()?;
                *lock(&self.held) = None;
                say("detached", json!({ "token": lease.detach()? }));
            }
            "hold" => return self.hold(order).await,
            "claim" => return self.claim(order).await,
            "holding" => {
                let held = self.crowd.iter().filter(|lease| lease.held()).count();
                say("holding", json!({ "count": held }));
            }
            "release-all" => {
                self.release_all().await;
                say("released", json!({}));
            }
            "guard-all" => return self.guard_all(orders).await,
            "observe" => self.observe(order),
            "adopt" => return self.adopt(order).await,
            "check" => {
                self.held_lease()?.check()?;
                say("held", json!({}));
            }
            "renew" => {
                self.held_lease()?.renew().await?;
                say("done", json!({}));
            }
            "release" => {
                if let Held::Lease(lease) = self.held()? {
                    lease.check()?;
                }
                self.held()?.release().await?;
                say("released", json!({}));
            }
            "write" => return self.write(order).await,
            "guard" | "present" => return self.transaction(order, orders).await,
            "truncate" => {
                let held = self.held()?;
                let mut client = connect(&self.url, NoTls).await?;
                let guarded = held.guard(&mut client).await?;
                guarded.batch_execute("TRUNCATE work").await?;
                guarded.commit().await?;
                say("wrote", json!({}));
            }
            "unfenced" => {
                let client = connect(&self.url, NoTls).await?;
                client.batch_execute(&update(order)).await?;
                say("wrote", json!({}));
            }
            "starve" => {
                self.observed.starve();
                say("done", json!({}));
            }
            "lead" => self.lead(order),
            "census" => say("census", json!({ "tasks": census() })),
            "close" => self.close().await,
            "update" | "sleep" | "commit" | "rollback" => return Err(Nothing.into()),
            _ => return Err("unknown order".into()),
        }
        Ok(())
    }

    fn held(&self) -> Result<Held, Nothing> {
        lock(&self.held).clone().ok_or(Nothing)
    }

    fn held_lease(&self) -> Result<Lease, Nothing> {
        match self.held()? {
            Held::Lease(lease) => Ok(lease),
            Held::Adopted(_) => Err(Nothing),
        }
    }

    async fn acquire(&mut self, order: &Value) -> Outcome {
        self.give_back().await;
        let mut request = self.fence.lease(names(order));
        request = request.ttl(ms(&order["ttl_ms"])).wait(ms(&order["wait_ms"]));
        if order["session"] == true {
            request = request.session();
        }
        if order["shared"] == true {
            request = request.shared();
        }
        if let Some(slots) = order["slots"].as_i64() {
            request = request.slots(slots.try_into()?);
        }
        if order["hold_at_most_ms"].is_u64() {
            request = request.hold_at_most(ms(&order["hold_at_most_ms"]));
        }
        if order["hold_at_least_ms"].is_u64() {
            request = request.hold_at_least(ms(&order["hold_at_least_ms"]));
        }
        match request.try_acquire().await? {
            Some(lease) => self.acquired(lease),
            None => say("taken", json!({})),
        }
        Ok(())
    }

    fn acquired(&self, lease: Lease) {
        self.observed.acquired(lease.names());
        say_granted("acquired", &lease);
        *lock(&self.held) = Some(Held::Lease(lease));
    }

    async fn resume(&mut self, order: &Value) -> Outcome {
        self.give_back().await;
        let name = order["name"].as_str().unwrap_or_default();
        let token = order["token"].as_i64().unwrap_or_default();
        let lease = self.fence.resume(name, token, ms(&order["ttl_ms"])).await?;
        self.acquired(lease);
        Ok(())
    }

    // Many leases

    async fn hold(&mut self, order: &Value) -> Outcome {
        for name in names(order) {
            let request = self.fence.lease(name).ttl(ms(&order["ttl_ms"]));
            let Some(lease) = request.try_acquire().await? else {
                say("taken", json!({}));
                return Ok(());
            };
            self.crowd.push(lease);
        }
        say("holding", json!({ "count": self.crowd.len() }));
        Ok(())
    }

    async fn claim(&mut self, order: &Value) -> Outcome {
        let limit = order["n"].as_u64().unwrap_or_default().try_into()?;
        let claim = self.fence.claim("SELECT unnest($1::text[])", limit);
        let claim = claim.bind(names(order), Type::TEXT_ARRAY).ttl(ms(&order["ttl_ms"]));
        let claimed = claim.acquire().await?;
        let leases: Vec<Lease> = claimed.into_iter().map(|claimed| claimed.lease).collect();
        let names: Vec<&String> = leases.iter().flat_map(Lease::names).collect();
        say("claimed", json!({ "names": names }));
        self.crowd.extend(leases);
        Ok(())
    }

    async fn release_all(&mut self) {
        for lease in self.crowd.drain(..) {
            // A loss has been told before.
            let _ = lease.release().await;
        }
    }

    async fn guard_all(&mut self, orders: &mut Orders) -> Outcome {
        let mut client = connect(&self.url, NoTls).await?;
        let guarded = guard_all(&self.crowd, &mut client).await?;
        say("guarded", json!({}));
        self.until_its_end(guarded, orders).await
    }

    fn observe(&mut self, order: &Value) {
        let name = order["name"].as_str().unwrap_or_default().to_owned();
        let mut observer = self.fence.observe(name.as_str());
        self.observing = Some(tokio::spawn(async move {
            while let Ok(leader) = observer.changed().await {
                let (holder, token) = (leader.holder, leader.token);
                say("leader", json!({ "name": name, "holder": holder, "token": token }));
            }
        }));
        say("done", json!({}));
    }

    async fn adopt(&mut self, order: &Value) -> Outcome {
        let name = order["name"].as_str().unwrap_or_default();
        let request = self.fence.adopt(name, order["token"].as_i64().unwrap_or_default());
        match request.wait(ms(&order["wait_ms"])).try_acquire().await? {
            Some(adopted) => {
                say("adopted", json!({ "token": adopted.token() }));
                *lock(&self.held) = Some(Held::Adopted(adopted));
            }
            None => say("taken", json!({})),
        }
        Ok(())
    }

    /// A whole transaction; with `release`, the last one.
    async fn write(&mut self, order: &Value) -> Outcome {
        let held = self.held()?;
        let mut client = connect(&self.url, NoTls).await?;
        let guarded = match order["by"].as_str() {
            Some("present") => held.present(&mut client).await?,
            _ => held.guard(&mut client).await?,
        };
        guarded.batch_execute(&update(order)).await?;
        if order["release"] == true {
            guarded.commit_and_release().await?;
        } else {
            guarded.commit().await?;
        }
        client.close().await;
        say("wrote", json!({}));
        Ok(())
    }

    /// Until it reads `commit` or `rollback`, what it does is one transaction.
    async fn transaction(&mut self, order: &Value, orders: &mut Orders) -> Outcome {
        let held = self.held()?;
        let mut client = connect(&self.url, NoTls).await?;
        let guarded = if order["do"] == "guard" {
            let guarded = held.guard(&mut client).await?;
            say("guarded", json!({}));
            guarded
        } else {
            let guarded = held.present(&mut client).await?;
            say("presented", json!({}));
            guarded
        };
        self.until_its_end(guarded, orders).await
    }

    async fn until_its_end(&self, guarded: Guarded<'_>, orders: &mut Orders) -> Outcome {
        let mut renewals = self.observed.transaction_is_open();
        let commits = steps(&guarded, orders, &mut renewals).await;
        self.observed.transaction_has_ended();
        if commits? {
            guarded.commit().await?;
            say("committed", json!({}));
        } else {
            guarded.rollback().await?;
            say("rolled-back", json!({}));
        }
        Ok(())
    }

    fn lead(&mut self, order: &Value) {
        let request =
            self.fence.lease(order["name"].as_str().unwrap_or_default()).ttl(ms(&order["ttl_ms"]));
        let (stop, stopped) = oneshot::channel::<()>();
        let (place, observed) = (self.held.clone(), self.observed.clone());
        let leading = tokio::spawn(async move {
            let work = async |lease: Lease| {
                observed.acquired(lease.names());
                say_granted("leading", &lease);
                *lock(&place) = Some(Held::Lease(lease));
                std::future::pending::<Result<(), Error>>().await
            };
            let told = async { drop(stopped.await) };
            match request.lead_until(told, work).await {
                Ok(None) => {}
                ended => say("stopped", json!({ "message": format!("{ended:?}") })),
            }
        });
        self.leading = Some((stop, leading));
        say("done", json!({}));
    }

    async fn close(&mut self) {
        if let Some((stop, leading)) = self.leading.take() {
            drop(stop);
            let _ = leading.await;
        }
        if let Some(observing) = self.observing.take() {
            observing.abort();
            let _ = observing.await;
        }
        self.give_back().await;
        self.release_all().await;
        say("closed", json!({}));
    }

    async fn give_back(&mut self) {
        let held = lock(&self.held).take();
        if let Some(held) = held {
            // A caller that closes has been told of a loss before.
            let _ = held.release().await;
        }
    }
}

/// What is read within a transaction; whether it is to be committed.
async fn steps(
    guarded: &Guarded<'_>,
    orders: &mut Orders,
    renewals: &mut mpsc::UnboundedReceiver<observed::Renewal>,
) -> Result<bool, Box<dyn StdError>> {
    loop {
        let order = tokio::select! {
            order = orders.recv() => order.ok_or("no order")?,
            Some((token, answer)) = renewals.recv() => {
                let renewed = guarded.query_one(RENEW_IN_WORK, &[&token]).await;
                let _ = answer.send(renewed.map(|row| row.get(0)));
                continue;
            }
        };
        match order["do"].as_str().unwrap_or_default() {
            "update" => {
                guarded.batch_execute(&update(&order)).await?;
                say("updated", json!({}));
            }
            "sleep" => {
                // In the server, so that the work hangs in its connection.
                let seconds = ms(&order["ms"]).as_secs_f64();
                guarded.batch_execute(&format!("SELECT pg_sleep({seconds})")).await?;
                say("slept", json!({}));
            }
            "commit" => return Ok(true),
            "rollback" => return Ok(false),
            _ => return Err("what?".into()),
        }
    }
}

/// As one text: a statement that is prepared is none for a pooler.
fn update(order: &Value) -> String {
    format!(
        "UPDATE work SET value = '{}' WHERE id = 1",
        order["value"].as_str().unwrap_or_default()
    )
}

fn names(order: &Value) -> Vec<String> {
    let names = order["names"].as_array().into_iter().flatten().filter_map(Value::as_str);
    names.map(str::to_owned).collect()
}

fn ms(value: &Value) -> Duration {
    Duration::from_millis(value.as_u64().unwrap_or(0))
}

/// Tasks, and files that are open, as sockets are.
fn census() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    Handle::current().metrics().num_alive_tasks() + files
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
